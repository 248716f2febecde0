# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, name-defined, misc"
# ruff: noqa: N803
"""The sampled verdict in Triton: accept tests, then one draw from the residual or the bonus row.

The target's distribution of a row is p(x) = exp((x - top) / T) / Z over logits x >= cut; `row_stats` or
`row_cutoff` has found top, Z and cut. The proposal q is a point mass (MODE 0), dense (1) or sparse (2); 3 excludes
children. Rules: token by token (Leviathan et al. 2211.17192, Chen et al. 2302.01318) or block (Sun et al. 2403.10444).
"""

import triton
import triton.language as tl

# The largest float32 below 1: a double close to 1 may have been rounded to 1.
LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def row_state(best_ptr, sum_ptr, cut_ptr, row, parts, inverse, BLOCK_P: tl.constexpr, TRUNCATED: tl.constexpr):
    """(top, 1 / Z, cut) of a row from its parts."""
    part = tl.arange(0, BLOCK_P)
    best = tl.load(best_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    total = tl.load(sum_ptr + row * parts + part, mask=part < parts, other=0.0)
    top = tl.max(best, 0)
    z = tl.sum(total * tl.exp((best - top) * inverse), 0)
    cut = float("-inf")
    if TRUNCATED:
        cut = tl.load(cut_ptr + row)
    return top, 1.0 / z, cut


@triton.jit
def _q_at(q_ptr, q_ids_ptr, row, ids, token, vocab, width, live, MODE: tl.constexpr):
    """Proposal probabilities of the tokens `ids` (a vector) at a draft row; 0 where `live` is false."""
    if MODE == 1:
        inside = live & (ids >= 0) & (ids < vocab)
        q = tl.load(q_ptr + row.to(tl.int64) * vocab + ids, mask=inside, other=0.0)
    elif MODE == 2:
        q = tl.zeros(ids.shape, tl.float32)
        for i in tl.range(0, tl.where(live, width, 0)):
            held = tl.load(q_ids_ptr + row * width + i)
            q += tl.where(ids == held, tl.load(q_ptr + row * width + i), 0.0)
    elif MODE == 3:
        # Children of tree row `token` (q_ptr holds every node's parent row): rejected, so nothing is left.
        q = tl.zeros(ids.shape, tl.float32)
        for i in tl.range(0, tl.where(live, width, 0)):
            child = tl.load(q_ptr + row * width + i) == token
            q = tl.where((ids == tl.load(q_ids_ptr + row * width + i)) & child, float("inf"), q)
    else:
        q = tl.where((ids == token) & live, 1.0, 0.0)
    return q


@triton.jit
def _weights(
    logits_ptr, q_ptr, q_ids_ptr, row, q_row, ids, token, top, scale, cut, inverse, residual, vocab, width,
    MODE: tl.constexpr,
):  # fmt: skip
    """max(0, scale * exp((x - top) / T) - q) of one tile of a row; without q where `residual` is false."""
    x = tl.load(logits_ptr + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    p = tl.where((x >= cut) & (ids < vocab), tl.exp((x - top) * inverse) * scale, 0.0)
    q = _q_at(q_ptr, q_ids_ptr, q_row, ids, token, vocab, width, residual, MODE)
    return tl.maximum(p - q, 0.0)


@triton.jit
def _masses(
    logits_ptr, q_ptr, q_ids_ptr, row, q_row, token, top, scale, cut, inverse, residual, vocab, width,
    BLOCK_V: tl.constexpr, TILES: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The sum of `_weights` over every tile of a row: [TILES]."""
    tile = tl.arange(0, TILES)
    masses = tl.zeros([TILES], tl.float32)
    for t in tl.range(0, tl.cdiv(vocab, BLOCK_V)):
        weight = _weights(
            logits_ptr, q_ptr, q_ids_ptr, row, q_row, t * BLOCK_V + tl.arange(0, BLOCK_V), token, top, scale,
            cut, inverse, residual, vocab, width, MODE,
        )  # fmt: skip
        masses = tl.where(tile == t, tl.sum(weight, 0), masses)
    return masses


@triton.jit
def first_above(weight, before, goal, SIZE: tl.constexpr):
    """The first index at which before + cumulative weight exceeds goal; else the last one with weight."""
    lane = tl.arange(0, SIZE)
    reached = (before + tl.cumsum(weight, 0) > goal) & (weight > 0)
    first = tl.min(tl.where(reached, lane, SIZE), 0)
    last = tl.max(tl.where(weight > 0, lane, 0), 0)
    return tl.minimum(first, last)


@triton.jit
def draw_token(
    logits_ptr, q_ptr, q_ids_ptr, row, q_row, token, top, scale, cut, inverse, residual, uniform, vocab, width,
    BLOCK_V: tl.constexpr, TILES: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """One token of the residual (or bonus) row by inverse cumulative sum in vocabulary order."""
    masses = _masses(
        logits_ptr, q_ptr, q_ids_ptr, row, q_row, token, top, scale, cut, inverse, residual, vocab, width,
        BLOCK_V, TILES, MODE,
    )  # fmt: skip
    goal = uniform * tl.sum(masses, 0)
    chosen = first_above(masses, 0.0, goal, TILES)
    before = tl.sum(tl.where(tl.arange(0, TILES) < chosen, masses, 0.0), 0)
    weight = _weights(
        logits_ptr, q_ptr, q_ids_ptr, row, q_row, chosen * BLOCK_V + tl.arange(0, BLOCK_V), token, top, scale,
        cut, inverse, residual, vocab, width, MODE,
    )  # fmt: skip
    return chosen * BLOCK_V + first_above(weight, before, goal, BLOCK_V), tl.sum(masses, 0)


@triton.jit
def accept_sampled(
    logits_ptr, drafts_ptr, lengths_ptr, q_ptr, q_ids_ptr, uniforms_ptr, temperature_ptr, best_ptr, sum_ptr,
    cut_ptr, accepted_ptr, next_ptr, cause_ptr, steps, parts, vocab, width,
    BLOCK_V: tl.constexpr, TILES: tl.constexpr, BLOCK_P: tl.constexpr,
    MODE: tl.constexpr, TRUNCATED: tl.constexpr, BLOCK_RULE: tl.constexpr,
):  # fmt: skip
    """Grid (B): accept drafts in order, then draw the token that follows; uniforms [B, steps + 1]."""
    slot = tl.program_id(0)
    length = tl.load(lengths_ptr + slot)
    inverse = 1.0 / tl.load(temperature_ptr + slot)
    accepted, alive = 0, 1
    carried, kept = 1.0, 1.0
    one = tl.zeros([1], tl.int32)
    for i in tl.range(0, length):
        row, q_row = slot * (steps + 1) + i, slot * steps + i
        top, scale, cut = row_state(best_ptr, sum_ptr, cut_ptr, row, parts, inverse, BLOCK_P, TRUNCATED)
        draft = tl.load(drafts_ptr + q_row).to(tl.int32)
        # A token outside the vocabulary has no probability.
        known = (draft >= 0) & (draft < vocab)
        x = tl.load(logits_ptr + row.to(tl.int64) * vocab + draft, mask=known, other=float("-inf")).to(tl.float32)
        p = tl.where((x >= cut) & known, tl.exp((x - top) * inverse) * scale, 0.0)
        q = tl.sum(_q_at(q_ptr, q_ids_ptr, q_row, one + draft, draft, vocab, width, True, MODE), 0)
        uniform = tl.minimum(tl.load(uniforms_ptr + slot * (steps + 1) + i), LARGEST_UNIFORM)
        if BLOCK_RULE:
            joint = carried * p
            carried = tl.where(joint <= 0.0, 0.0, joint / tl.where(joint > 0.0, tl.maximum(joint, q), 1.0))
            share = carried
            if i + 1 < length:
                top, scale, cut = row_state(best_ptr, sum_ptr, cut_ptr, row + 1, parts, inverse, BLOCK_P, TRUNCATED)
                following = tl.load(drafts_ptr + q_row + 1).to(tl.int32)
                left = tl.sum(
                    _masses(
                        logits_ptr, q_ptr, q_ids_ptr, row + 1, q_row + 1, following, top, scale * carried, cut,
                        inverse, True, vocab, width, BLOCK_V, TILES, MODE,
                    ),
                    0,
                )  # fmt: skip
                rest = left + 1.0 - carried
                share = tl.where(rest > 0.0, left / tl.where(rest > 0.0, rest, 1.0), 1.0)
            hit = uniform < share
            accepted = tl.where(hit, i + 1, accepted)
            kept = tl.where(hit, carried, kept)
        else:
            alive = alive & (uniform * q < p).to(tl.int32)
            accepted += alive
    rejected = accepted < length
    row, q_row = slot * (steps + 1) + accepted, slot * steps + tl.minimum(accepted, steps - 1)
    top, scale, cut = row_state(best_ptr, sum_ptr, cut_ptr, row, parts, inverse, BLOCK_P, TRUNCATED)
    token = tl.load(drafts_ptr + q_row, mask=rejected, other=-1).to(tl.int32)
    uniform = tl.minimum(tl.load(uniforms_ptr + slot * (steps + 1) + steps), LARGEST_UNIFORM)
    weight = scale * tl.where(rejected, kept, 1.0)
    chosen, mass = draw_token(
        logits_ptr, q_ptr, q_ids_ptr, row, q_row, token, top, weight, cut, inverse, rejected, uniform, vocab,
        width, BLOCK_V, TILES, MODE,
    )  # fmt: skip
    if mass <= 0.0:
        # p equals q but for rounding: any draw of p is right.
        chosen, mass = draw_token(
            logits_ptr, q_ptr, q_ids_ptr, row, q_row, token, top, scale, cut, inverse, False, uniform, vocab,
            width, BLOCK_V, TILES, MODE,
        )  # fmt: skip
    tl.store(accepted_ptr + slot, accepted)
    tl.store(next_ptr + slot, chosen.to(tl.int64))
    tl.store(cause_ptr + slot, tl.where(rejected, 1, 0))
