# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, name-defined, misc"
# ruff: noqa: N803
"""Walk of a block drafter's top-k lattice in Triton: one program a sequence, greedy or sampled with its q."""

import triton
import triton.language as tl


@triton.jit
def _pick(score, lane, live, uniform, inverse_temperature, SAMPLED: tl.constexpr):
    """The chosen candidate of one position and the distribution it was chosen from."""
    best = tl.max(score, 0)
    weight = tl.where(live, tl.exp((score - best) * inverse_temperature), 0.0)
    probs = weight / tl.sum(weight, 0)
    if SAMPLED:
        # The first candidate whose cumulative probability exceeds the draw; the last one with weight when
        # rounding leaves the sum below it.
        reached = (tl.cumsum(probs, 0) > uniform) & (probs > 0)
        first = tl.min(tl.where(reached, lane, lane.shape[0]), 0)
        last = tl.max(tl.where(probs > 0, lane, 0), 0)
        choice = tl.minimum(first, last)
    else:
        choice = tl.min(tl.where(live & (score == best), lane, lane.shape[0]), 0)
        probs = tl.where(lane == choice, 1.0, 0.0)
    return choice, probs


@triton.jit
def markov_walk(
    ids_ptr, scores_ptr, uniforms_ptr, path_ptr, q_ptr, n, k, inverse_temperature,
    BLOCK_K: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Grid (B): ids [B,n,k], scores [B,n,k,k] -> path [B,n] and the q it was drawn from [B,n,k].

    scores[b,i,a,c] scores candidate c of position i after candidate a of position i - 1; row 0 of position 0 is
    the anchor's.
    """
    slot = tl.program_id(0)
    lane = tl.arange(0, BLOCK_K)
    live = lane < k
    previous = 0
    for i in tl.range(0, n):
        at = (slot * n + i) * k
        score = tl.load(scores_ptr + (at + previous) * k + lane, mask=live, other=float("-inf"))
        uniform = tl.load(uniforms_ptr + slot * n + i)
        choice, probs = _pick(score, lane, live, uniform, inverse_temperature, SAMPLED)
        previous = choice
        tl.store(path_ptr + slot * n + i, tl.load(ids_ptr + at + choice))
        tl.store(q_ptr + at + lane, probs, mask=live)
