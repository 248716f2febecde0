"""Speculative acceptance written straight from the papers' formulas in float64, one sequence at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any


def target_probs(logits: Array, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Array:
    """The plain sampler's distribution of one row: temperature, top-k, top-p, min-p; equal logits stay together."""
    x = logits.astype(np.float64)
    p = np.exp((x - x.max()) / temperature)
    if 0 < top_k < len(x):
        p[x < np.sort(x)[-top_k]] = 0
    if top_p < 1:
        order = np.argsort(-x, kind="stable")
        reached = np.cumsum(p[order]) >= top_p * p.sum()
        p[x < x[order][int(reached.argmax())]] = 0
    if min_p > 0:
        p[p < min_p * p.max()] = 0
    return p / p.sum()


def draw(weights: Array, fallback: Array, uniform: float) -> int:
    """Inverse cumulative sum in vocabulary order."""
    weights = weights if weights.sum() > 0 else fallback
    above = np.flatnonzero((np.cumsum(weights) > uniform * weights.sum()) & (weights > 0))
    return int(above[0]) if above.size else int(np.flatnonzero(weights)[-1])


def token_rule(p: Array, q: Array, drafts: Array, uniforms: Array) -> tuple[int, int]:
    """p [K + 1, V], q [K, V]: accept while u q(x) < p(x), then draw from max(0, p - q) or the bonus row."""
    n = 0
    while n < len(drafts) and uniforms[n] * q[n][drafts[n]] < p[n][drafts[n]]:
        n += 1
    weights = np.maximum(p[n] - q[n], 0) if n < len(drafts) else p[n]
    return n, draw(weights, p[n], uniforms[-1])


def block_rule(p: Array, q: Array, drafts: Array, uniforms: Array) -> tuple[int, int]:
    """Block verification (Sun et al. 2403.10444): the largest i with u_i <= h_i."""
    w, kept, n = 1.0, 1.0, 0
    for i, x in enumerate(drafts):
        w = min(1.0, w * p[i][x] / q[i][x])
        share = w
        if i + 1 < len(drafts):
            left = np.maximum(w * p[i + 1] - q[i + 1], 0).sum()
            share = left / (left + 1 - w) if left + 1 - w > 0 else 1.0
        if uniforms[i] <= share:
            n, kept = i + 1, w
    weights = np.maximum(kept * p[n] - q[n], 0) if n < len(drafts) else p[n]
    return n, draw(weights, p[n], uniforms[-1])


def tree_rule(p: Array, tokens: Array, parents: Array, uniforms: Array) -> tuple[list[int], int]:
    """Children of the current row in order, each a point mass; p [nodes + 1, V]. Returns (rows kept, next)."""
    path, current = [0], 0
    remaining = p[0].copy()
    for j, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent != current:
            continue
        if uniforms[j] * remaining.sum() < remaining[token]:
            current = j + 1
            path.append(current)
            remaining = p[current].copy()
        else:
            remaining[token] = 0
    return path, draw(remaining, p[current], uniforms[-1])
