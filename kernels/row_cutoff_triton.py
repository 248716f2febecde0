# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, name-defined, misc"
# ruff: noqa: N803
"""The logit below which top-k, top-p and min-p leave nothing, and the mass above it: one program a row.

Top-k and top-p ask for the largest threshold that leaves at least k tokens or at least a mass. Both are monotone in the
threshold, so it is bracketed by sixteen thresholds a pass, placed evenly between the bracket's ends as numbers and as
bits (integers of the same order) in turn: numbers come near fast in a usual row, bits bound the passes in any row. The
search ends when one logit is left in the bracket, so it is exact to the last bit and equal logits stay or go together.
"""

import triton
import triton.language as tl


@triton.jit
def _key(x):
    """Bits of fp32 numbers as unsigned integers of the same order; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _number(key):
    """The fp32 number of a key."""
    bits = tl.where((key >> 31) != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _pivots(low, high, turn):
    """Sixteen rising keys inside (low, high), evenly spaced as numbers in even turns and as keys in odd ones."""
    step = tl.arange(0, 16).to(tl.uint32) + 1
    gap = high - low
    by_key = low + (gap // 17) * step + (gap % 17) * step // 17
    # Masked tokens may have logits near the end of the range, whose differences would overflow.
    bottom, top = tl.maximum(_number(low), -1e30), tl.minimum(_number(high), 1e30)
    by_number = _key(bottom + (top - bottom) * (step.to(tl.float32) * (1.0 / 17.0)))
    return tl.minimum(tl.maximum(tl.where(turn % 2 == 0, by_number, by_key), low + 1), high - 1)


@triton.jit
def _narrow(line, vocab, low, high, pivot, top, inverse, BY_MASS: tl.constexpr, BLOCK_V: tl.constexpr):
    """One pass: what is held at or above each pivot, and the least and greatest key inside [low, high)."""
    lane = tl.arange(0, BLOCK_V)
    held = tl.zeros([16], tl.float32)
    least = tl.full([BLOCK_V], 0xFFFFFFFF, tl.uint32)
    most = tl.zeros([BLOCK_V], tl.uint32)
    for start in tl.range(0, vocab, BLOCK_V):
        real = start + lane < vocab
        x = tl.load(line + start + lane, mask=real, other=float("-inf")).to(tl.float32)
        key = _key(x)
        weight = tl.where(real, 1.0, 0.0)
        if BY_MASS:
            weight = weight * tl.exp((x - top) * inverse)
        held += tl.sum(tl.where(key[None, :] >= pivot[:, None], weight[None, :], 0.0), 1)
        inside = real & (key >= low) & (key < high)
        least = tl.minimum(least, tl.where(inside, key, 0xFFFFFFFF))
        most = tl.maximum(most, tl.where(inside, key, 0))
    return held, tl.min(least, 0), tl.max(most, 0)


@triton.jit
def _largest_key(line, vocab, goal, low, held_low, top, inverse, BY_MASS: tl.constexpr, BLOCK_V: tl.constexpr):
    """(key, held): the largest key at or above `low` whose tokens count, or weigh, at least `goal`; and how much.

    `held_low` is what is held at or above `low`.
    """
    high = _key(top) + 1
    settled, turn = 0, 0
    while settled == 0:
        pivot = _pivots(low, high, turn)
        held, least, most = _narrow(line, vocab, low, high, pivot, top, inverse, BY_MASS, BLOCK_V)
        enough = held >= goal
        settled = (least >= most).to(tl.int32)
        held_low = tl.minimum(held_low, tl.min(tl.where(enough, held, float("inf")), 0))
        below = tl.max(tl.where(enough, pivot, low), 0)
        high = tl.min(tl.where(enough, high, pivot), 0)
        # One key is left (or, by a rounding of the goal, none): it is the answer.
        low = tl.where(least == most, least, tl.where(settled != 0, low, below))
        turn += 1
    return low, held_low


@triton.jit
def _first_look(line, vocab, inverse, BLOCK_V: tl.constexpr):
    """(maximum, minimum, sum of exp((x - maximum) / T)) of a row in one pass."""
    lane = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    worst = tl.full([BLOCK_V], float("inf"), tl.float32)
    total = tl.zeros([BLOCK_V], tl.float32)
    for start in tl.range(0, vocab, BLOCK_V):
        real = start + lane < vocab
        x = tl.load(line + start + lane, mask=real, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(x, best)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp((best - anchor) * inverse) + tl.exp((x - anchor) * inverse)
        best = higher
        worst = tl.minimum(worst, tl.where(real, x, float("inf")))
    top = tl.max(best, 0)
    return top, tl.min(worst, 0), tl.sum(total * tl.exp((best - top) * inverse), 0)


@triton.jit
def _mass(line, vocab, cut, top, inverse, BLOCK_V: tl.constexpr):
    """The sum of exp((x - top) / T) over logits x >= cut."""
    lane = tl.arange(0, BLOCK_V)
    total = tl.zeros([BLOCK_V], tl.float32)
    for start in tl.range(0, vocab, BLOCK_V):
        x = tl.load(line + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
        total += tl.where((x >= cut) & (start + lane < vocab), tl.exp((x - top) * inverse), 0.0)
    return tl.sum(total, 0)


@triton.jit
def row_cutoff(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, best_ptr, sum_ptr, cut_ptr, vocab, rows,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid (B * rows): maximum, cut and mass of each row; top-k, then top-p of what it leaves, then min-p."""
    row = tl.program_id(0)
    slot = row // rows
    line = logits_ptr + row.to(tl.int64) * vocab
    inverse = 1.0 / tl.load(temperature_ptr + slot)
    top, bottom, total = _first_look(line, vocab, inverse, BLOCK_V)
    low = _key(bottom)
    k, share, least = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
    if (k > 0) & (k < vocab):
        count = vocab.to(tl.float32)
        low, count = _largest_key(line, vocab, k.to(tl.float32), low, count, top, inverse, False, BLOCK_V)
        total = _mass(line, vocab, _number(low), top, inverse, BLOCK_V)
    if share < 1.0:
        low, total = _largest_key(line, vocab, share * total, low, total, top, inverse, True, BLOCK_V)
    cut = _number(low)
    if least > 0.0:
        cut = tl.maximum(cut, top + tl.log(least) / inverse)
        total = _mass(line, vocab, cut, top, inverse, BLOCK_V)
    tl.store(best_ptr + row, top)
    tl.store(cut_ptr + row, cut)
    tl.store(sum_ptr + row, total)
