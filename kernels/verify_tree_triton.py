# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, name-defined, misc"
# ruff: noqa: N803
"""The verdict over a draft tree in Triton: each child is a point mass, tried in order of its row.

At a node with target distribution p, child x is accepted with probability p(x) over what its rejected elder
siblings left; when all are rejected the next token is drawn from p without them. That is exact for any tree
(the rule of EAGLE's `evaluate_posterior`).
"""

import triton
import triton.language as tl

from dsc.kernels.verify_sampled_triton import LARGEST_UNIFORM, draw_token, row_state


@triton.jit
def _best_token(best_ptr, token_ptr, row, parts, vocab, BLOCK_P: tl.constexpr):
    """The argmax of a row from its parts; equal logits go to the lower token."""
    part = tl.arange(0, BLOCK_P)
    best = tl.load(best_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    token = tl.load(token_ptr + row * parts + part, mask=part < parts, other=vocab)
    return tl.min(tl.where(best == tl.max(best, 0), token, vocab), 0)


@triton.jit
def accept_tree(
    logits_ptr, tokens_ptr, parents_ptr, lengths_ptr, uniforms_ptr, temperature_ptr, best_ptr, token_ptr,
    sum_ptr, cut_ptr, path_ptr, accepted_ptr, next_ptr, nodes, parts, vocab,
    BLOCK_V: tl.constexpr, TILES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    GREEDY: tl.constexpr, TRUNCATED: tl.constexpr,
):  # fmt: skip
    """Grid (B): tokens, parents [B, nodes]; node j is row j + 1 and its parent row comes before it.

    `path_ptr` [B, nodes + 1] receives the rows that stay, row 0 first, then zeros: the input of the pool's commit.
    """
    slot = tl.program_id(0)
    count = tl.load(lengths_ptr + slot)
    first_row = slot * (nodes + 1)
    current, accepted, left = 0, 0, 1.0
    inverse = 1.0
    if not GREEDY:
        inverse = 1.0 / tl.load(temperature_ptr + slot)
    node = tl.arange(0, BLOCK_N)
    tokens = tl.load(tokens_ptr + slot * nodes + node, mask=node < count, other=-1)
    parents = tl.load(parents_ptr + slot * nodes + node, mask=node < count, other=-1)
    path = tl.zeros([BLOCK_N], tl.int32)
    for j in tl.range(0, count):
        row = first_row + current
        child = tl.load(parents_ptr + slot * nodes + j) == current
        token = tl.load(tokens_ptr + slot * nodes + j)
        if GREEDY:
            hit = child & (token == _best_token(best_ptr, token_ptr, row, parts, vocab, BLOCK_P))
        else:
            top, scale, cut = row_state(best_ptr, sum_ptr, cut_ptr, row, parts, inverse, BLOCK_P, TRUNCATED)
            # A token outside the vocabulary, or tried before at this row, has no probability.
            before = tl.max(((node < j) & (parents == current) & (tokens == token)).to(tl.int32), 0) != 0
            known = (token >= 0) & (token < vocab) & child & (not before)
            x = tl.load(logits_ptr + row.to(tl.int64) * vocab + token, mask=known, other=float("-inf"))
            p = tl.where((x >= cut) & known, tl.exp((x.to(tl.float32) - top) * inverse) * scale, 0.0)
            uniform = tl.minimum(tl.load(uniforms_ptr + first_row + j), LARGEST_UNIFORM)
            hit = child & (uniform * left < p)
            left = tl.where(hit, 1.0, left - p)
        current = tl.where(hit, j + 1, current)
        accepted += hit.to(tl.int32)
        path = tl.where(node == accepted, current, path)
    tl.store(path_ptr + first_row + node, path, mask=node <= nodes)
    row = first_row + current
    if GREEDY:
        chosen = _best_token(best_ptr, token_ptr, row, parts, vocab, BLOCK_P)
    else:
        top, scale, cut = row_state(best_ptr, sum_ptr, cut_ptr, row, parts, inverse, BLOCK_P, TRUNCATED)
        uniform = tl.minimum(tl.load(uniforms_ptr + first_row + nodes), LARGEST_UNIFORM)
        # Nodes past the count are no children: what was tried is this sequence's first `count` nodes.
        up, tried = parents_ptr + slot * nodes, tokens_ptr + slot * nodes
        chosen, mass = draw_token(
            logits_ptr, up, tried, row, 0, current, top, scale, cut, inverse, True, uniform, vocab, count,
            BLOCK_V, TILES, 3,
        )  # fmt: skip
        if mass <= 0.0:
            chosen, mass = draw_token(
                logits_ptr, up, tried, row, 0, current, top, scale, cut, inverse, False, uniform, vocab, count,
                BLOCK_V, TILES, 3,
            )  # fmt: skip
    tl.store(accepted_ptr + slot, accepted)
    tl.store(next_ptr + slot, chosen.to(tl.int64))
