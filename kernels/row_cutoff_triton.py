# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, name-defined, misc"
# ruff: noqa: N803
"""The logit below which top-k, top-p and min-p leave nothing, and the mass above it: one program a row.

Top-k and top-p ask for the largest threshold that leaves at least k tokens or at least a mass. Both are monotone
in the threshold, so it is found digit by digit on the logits' bits, read as integers of the same order: eight
passes of sixteen thresholds each, exact to the last bit. Equal logits stay or go together.
"""

import triton
import triton.language as tl


@triton.jit
def _key(x):
    """Bits of fp32 numbers as unsigned integers of the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _number(key):
    """The fp32 number of a key."""
    bits = tl.where((key >> 31) != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _largest_key(line, vocab, goal, floor, top, inverse, BY_MASS: tl.constexpr, BLOCK_V: tl.constexpr):
    """The largest key whose tokens at or above it (and `floor`) count, or weigh, at least `goal`."""
    digit, lane = tl.arange(0, 16).to(tl.uint32), tl.arange(0, BLOCK_V)
    base = floor ^ floor
    unit = base | (1 << 28)
    for _ in tl.range(0, 8):
        pivot = base + digit * unit
        held = tl.zeros([16], tl.float32)
        for start in tl.range(0, vocab, BLOCK_V):
            x = tl.load(line + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
            key = _key(x)
            weight = tl.where((key >= floor) & (start + lane < vocab), 1.0, 0.0)
            if BY_MASS:
                weight = weight * tl.exp((x - top) * inverse)
            held += tl.sum(tl.where(key[None, :] >= pivot[:, None], weight[None, :], 0.0), 1)
        reached = tl.sum(tl.where(held >= goal, 1, 0), 0)
        base = base + tl.maximum(reached - 1, 0).to(tl.uint32) * unit
        unit = unit >> 4
    return base


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
    lane = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    for start in tl.range(0, vocab, BLOCK_V):
        x = tl.load(line + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    floor = _key(top) ^ _key(top)
    k, share, least = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
    if (k > 0) & (k < vocab):
        floor = _largest_key(line, vocab, k.to(tl.float32), floor, top, inverse, False, BLOCK_V)
    cut = tl.where(floor == 0, float("-inf"), _number(floor))
    if share < 1.0:
        goal = share * _mass(line, vocab, cut, top, inverse, BLOCK_V)
        cut = _number(_largest_key(line, vocab, goal, floor, top, inverse, True, BLOCK_V))
    if least > 0.0:
        cut = tl.maximum(cut, top + tl.log(least) / inverse)
    tl.store(best_ptr + row, top)
    tl.store(cut_ptr + row, cut)
    tl.store(sum_ptr + row, _mass(line, vocab, cut, top, inverse, BLOCK_V))
