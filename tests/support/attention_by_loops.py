"""Attention over a KV pool, one query at a time: slow, plain, and independent of what it judges."""

from __future__ import annotations

import numpy as np


def rotate_half(x, cos, sin):
    """x [B, H, S, D] rotated; cos, sin [B, S, R/2] turn the first R elements."""
    half = cos.shape[-1]
    c, s = cos[:, None], sin[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], -1)


def attend(q, k, v, k_pool, v_pool, past, *, scale, window=-1, softcap=0.0, sinks=None, tree_mask=None):
    """VerifyAttention as its contract says; returns o and the two new pools."""
    k_pool, v_pool = k_pool.copy(), v_pool.copy()
    batch, n_heads, seq, _ = q.shape
    group = n_heads // k.shape[1]
    out = np.zeros_like(q)
    for b in range(batch):
        k_pool[b, :, past[b] : past[b] + seq] = k[b]
        v_pool[b, :, past[b] : past[b] + seq] = v[b]
        for h in range(n_heads):
            for s in range(seq):
                at = past[b] + s
                visible = np.arange(at + 1)
                if window > 0:
                    visible = visible[visible > at - window]
                if tree_mask is not None:
                    visible = np.array([j for j in visible if j < past[b] or tree_mask[b, 0, s, j - past[b]]])
                scores = scale * k_pool[b, h // group, visible] @ q[b, h, s]
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                extra = [] if sinks is None else [sinks[h]]
                top = max([*scores, *extra])
                weights = np.exp(scores - top)
                total = weights.sum() + sum(np.exp(e - top) for e in extra)
                out[b, h, s] = (weights / total) @ v_pool[b, h // group, visible]
    return out, k_pool, v_pool
