"""Lossless acceptance of drafts, one sequence at a time in float64: the definition that every implementation follows.

A rule gets the target's distributions p [n + 1, V] after each of the n drafts and returns how many drafts hold and the
token that follows them; whatever proposed the drafts, the tokens it emits have the target's own law. Uniform numbers
are inputs, one for every draft's test and one for the draw, so the result is a function of the inputs.

Tests are strict, ``u q < p`` with u in [0, 1): a token to which the target gives nothing never passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsc.kernels.contract import Array

LARGEST_UNIFORM = float(np.nextafter(np.float32(1), np.float32(0)))
"""Uniforms are limited to the largest float32 below 1: a double close to 1 may have been rounded to it."""


@dataclass(frozen=True)
class Verdict:
    """The first `accepted` drafts hold, then comes `next_token`."""

    accepted: int
    next_token: int


@dataclass(frozen=True)
class TreeVerdict:
    """The rows that hold, the root's row 0 first, and the token that follows the last of them."""

    path: tuple[int, ...]
    next_token: int


def target_distribution(
    logits: Array, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Array:
    """The distribution [V] that plain sampling draws from, for one row of logits [V].

    Temperature, then top-k, top-p and min-p, each on what the one before left. Tokens with equal logits stay or go
    together, so the outcome depends neither on their order nor on how a sort treats them.

    Args:
        top_k: keep the k most likely tokens; 0, or V and more, keeps all.
        top_p: keep the smallest set of most likely tokens whose share of the mass reaches this; 1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one.
    """
    x = logits.astype(np.float64)
    p = np.exp((x - x.max()) / temperature)
    falling = np.argsort(-x, kind="stable")
    if 0 < top_k < len(x):
        p[x < x[falling[top_k - 1]]] = 0
    if top_p < 1:
        mass = np.cumsum(p[falling])
        p[x < x[falling[np.searchsorted(mass, top_p * mass[-1])]]] = 0
    p[p < min_p * p.max()] = 0
    return np.asarray(p / p.sum())


def draw(weights: Array, uniform: float) -> int:
    """The token at `uniform` of the cumulative weights [V], in rising order of token ids."""
    mass = np.cumsum(weights)
    return int(np.searchsorted(mass, min(uniform * mass[-1], np.nextafter(mass[-1], 0)), side="right"))


def draw_residual(p: Array, taken: Array, uniform: float) -> int:
    """A token of ``max(0, p - taken)`` [V], or of p where nothing is left: then p and q differ by roundings only."""
    rest = np.maximum(p - taken, 0)
    return draw(rest if rest.sum() > 0 else p, uniform)


def greedy_rule(logits: Array, drafts: Sequence[int]) -> Verdict:
    """Drafts hold as long as they are their row's most likely token; equal logits go to the lower token."""
    best = logits.argmax(axis=-1)
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1
    return Verdict(accepted, int(best[accepted]))


def token_rule(p: Array, q: Array, drafts: Sequence[int], uniforms: Array) -> Verdict:
    """Accept x while ``u q(x) < p(x)``, else draw from ``max(0, p - q)``; after the last draft from p.

    Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). With point masses for q a draft
    holds with probability p(x) and the correction has p's law without x.

    Args:
        p: [n + 1, V], as the filters left them.
        q: [n, V], what the drafts were sampled from.
        uniforms: [>= n + 1], tests from the front, the draw last.
    """
    for i, token in enumerate(drafts):
        if not uniforms[i] * _at(q[i], token) < _at(p[i], token):
            return Verdict(i, draw_residual(p[i], q[i], uniforms[-1]))
    return Verdict(len(drafts), draw(p[len(drafts)], uniforms[-1]))


def block_rule(p: Array, q: Array, drafts: Sequence[int], uniforms: Array) -> Verdict:
    """Block verification: the longest prefix whose joint test passes; arguments as `token_rule`.

    Sun et al. 2025 (ICLR, arXiv 2403.10444), algorithm 2. With ``w_0 = 1, w_i = min(1, w_(i-1) p / q)`` prefix i
    passes when ``u_i < h_i``, where ``h_i = S_i / (S_i + 1 - w_i)``, S_i being the mass of ``max(0, w_i p - q)`` at the
    next position, and ``h_n = w_n``. Accepts at least as many drafts as any other exact rule, in expectation.
    """
    weight, kept, accepted = 1.0, 1.0, 0
    for i, token in enumerate(drafts, start=1):
        joint = weight * _at(p[i - 1], token)
        proposed = _at(q[i - 1], token)
        weight = 0.0 if joint <= 0 else 1.0 if joint >= proposed else joint / proposed
        share = weight
        if i < len(drafts):
            rest = float(np.maximum(weight * p[i] - q[i], 0).sum())
            share = rest / (rest + 1 - weight) if rest + 1 - weight > 0 else 1.0
        if uniforms[i - 1] < share:
            accepted, kept = i, weight
    if accepted == len(drafts):
        return Verdict(accepted, draw(p[accepted], uniforms[-1]))
    rest_row = np.maximum(kept * p[accepted] - q[accepted], 0)
    return Verdict(accepted, draw(rest_row if rest_row.sum() > 0 else p[accepted], uniforms[-1]))


def tree_rule(p: Array, tokens: Sequence[int], parents: Sequence[int], uniforms: Array) -> TreeVerdict:
    """Walk down a draft tree: at each row its children are tried in order, each as a point mass.

    A child x holds with probability p(x) over what its rejected elder siblings left of p; after the last child the
    next token is drawn from what is left. Exact for any tree, however it was chosen, as long as it was chosen without
    knowledge of the uniforms (the rule of EAGLE's `evaluate_posterior`). A chain gives `token_rule` with point masses.

    Args:
        p: [N + 1, V]; row 0 follows the text so far, row j + 1 follows node j.
        tokens: [N].
        parents: [N] rows; a parent's row comes before its children's.
        uniforms: [>= N + 1], node j's test at j, the draw last.
    """
    path, left = [0], p[0].copy()
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent != path[-1]:
            continue
        if uniforms[node] * left.sum() < _at(left, token):
            path.append(node + 1)
            left = p[node + 1].copy()
        elif 0 <= token < len(left):
            left[token] = 0
    fallback = left if left.sum() > 0 else p[path[-1]]
    return TreeVerdict(tuple(path), draw(fallback, uniforms[-1]))


def _at(distribution: Array, token: int) -> float:
    """A token outside the vocabulary has no probability."""
    return float(distribution[token]) if 0 <= token < len(distribution) else 0.0
