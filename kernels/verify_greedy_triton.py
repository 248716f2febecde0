# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, name-defined, misc"
# ruff: noqa: N803
"""Statistics of logit rows and the greedy verdict in Triton: two launches, logits read once, no softmax."""

import triton
import triton.language as tl


@triton.jit
def row_stats(
    logits_ptr, temperature_ptr, best_ptr, token_ptr, sum_ptr, vocab, rows,
    BLOCK_V: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Grid (B * rows, parts): each part's maximum, its lowest token, and for sampling its sum of exponentials.

    The sum is of exp((x - maximum) / temperature); equal logits go to the lower token, as in NumPy's argmax.
    """
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    share = tl.cdiv(tl.cdiv(vocab, parts), BLOCK_V) * BLOCK_V
    start = part * share
    end = tl.minimum(start + share, vocab)
    lane = tl.arange(0, BLOCK_V)
    line = logits_ptr + row.to(tl.int64) * vocab
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    token = tl.zeros([BLOCK_V], tl.int32) + start
    total = tl.zeros([BLOCK_V], tl.float32)
    inverse = 1.0
    if SUMS:
        inverse = 1.0 / tl.load(temperature_ptr + row // rows)
    for base in tl.range(start, end, BLOCK_V):
        x = tl.load(line + base + lane, mask=base + lane < end, other=float("-inf")).to(tl.float32)
        higher = x > best
        if SUMS:
            # Every lane keeps its own maximum, so that no reduction stands inside the loop.
            anchor = tl.where(tl.maximum(x, best) == float("-inf"), 0.0, tl.maximum(x, best))
            total = total * tl.exp((best - anchor) * inverse) + tl.exp((x - anchor) * inverse)
        token = tl.where(higher, base + lane, token)
        best = tl.where(higher, x, best)
    top = tl.max(best, 0)
    at = row * parts + part
    tl.store(best_ptr + at, top)
    tl.store(token_ptr + at, tl.min(tl.where(best == top, token, vocab), 0))
    if SUMS:
        anchor = tl.where(top == float("-inf"), 0.0, top)
        tl.store(sum_ptr + at, tl.sum(total * tl.exp((best - anchor) * inverse), 0))


@triton.jit
def accept_greedy(
    best_ptr, token_ptr, drafts_ptr, lengths_ptr, accepted_ptr, next_ptr, cause_ptr, steps, parts, vocab,
    BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Grid (B): the longest prefix of drafts that equal their row's argmax, and the token that follows it."""
    slot = tl.program_id(0)
    step, part = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_P)
    at = (slot * (steps + 1) + step)[:, None] * parts + part[None, :]
    mask = (step <= steps)[:, None] & (part < parts)[None, :]
    best = tl.load(best_ptr + at, mask=mask, other=float("-inf"))
    token = tl.load(token_ptr + at, mask=mask, other=vocab)
    top = tl.max(best, 1)
    chosen = tl.min(tl.where(best == top[:, None], token, vocab), 1)
    length = tl.load(lengths_ptr + slot)
    draft = tl.load(drafts_ptr + slot * steps + step, mask=step < length, other=-1)
    wrong = (step >= length) | (draft != chosen)
    accepted = tl.min(tl.where(wrong, step, BLOCK_S), 0)
    tl.store(accepted_ptr + slot, accepted)
    tl.store(next_ptr + slot, tl.sum(tl.where(step == accepted, chosen, 0), 0).to(tl.int64))
    tl.store(cause_ptr + slot, tl.where(accepted < length, 1, 0))
