# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, name-defined, misc"
# ruff: noqa: N803
"""Upkeep of the KV pool in Triton: compaction of an accepted path and replay of the rollback journal.

Both work on every pool of equal shape in one launch: `pools_ptr` is a table of pool addresses (K and V of every
layer), so a model with 30 layers costs one launch, not 60.
"""

import triton
import triton.language as tl


@triton.jit
def kv_commit(
    pools_ptr, past_ptr, path_ptr, count_ptr, pool_rows, heads, steps,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Grid (pools, B, heads): move row past + path[i] to past + i for i < count, in place.

    A path only descends a tree, so path[i] >= i. All rows are read before any is written, and a program touches
    one head of one slot only, so overlapping source and target rows are safe.
    """
    slot, head = tl.program_id(1), tl.program_id(2)
    address = tl.load(pools_ptr + tl.program_id(0))
    pool = address.to(tl.pointer_type(ELEMENT)) + (slot * heads + head).to(tl.int64) * pool_rows * HEAD_SIZE
    past, count = tl.load(past_ptr + slot), tl.load(count_ptr + slot)
    step, columns = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    source = tl.load(path_ptr + slot * steps + step, mask=step < count, other=0)
    mask = ((step < count) & (source != step))[:, None] & (columns < HEAD_SIZE)[None, :]
    rows = tl.load(pool + (past + source)[:, None] * HEAD_SIZE + columns[None, :], mask=mask, other=0)
    tl.debug_barrier()
    tl.store(pool + (past + step)[:, None] * HEAD_SIZE + columns[None, :], rows, mask=mask)


@triton.jit
def kv_rollback(journal_ptr, lengths_ptr, entries, BLOCK: tl.constexpr):
    """Grid (ceil(entries / BLOCK)): the length of each entry's slot becomes at most the entry's start.

    A journal entry is (slot, start, end). The least start wins, so the order of replay does not matter.
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < entries
    slot = tl.load(journal_ptr + entry * 3, mask=mask, other=0)
    start = tl.load(journal_ptr + entry * 3 + 1, mask=mask, other=0)
    tl.atomic_min(lengths_ptr + slot, start, mask=mask)


@triton.jit
def kv_erase(
    pools_ptr, journal_ptr, pool_rows, heads,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Grid (pools, entries, heads): zero the rows [start, end) of each journal entry (secure rollback)."""
    entry, head = tl.program_id(1), tl.program_id(2)
    slot = tl.load(journal_ptr + entry * 3)
    start, end = tl.load(journal_ptr + entry * 3 + 1), tl.load(journal_ptr + entry * 3 + 2)
    address = tl.load(pools_ptr + tl.program_id(0))
    pool = address.to(tl.pointer_type(ELEMENT)) + (slot * heads + head).to(tl.int64) * pool_rows * HEAD_SIZE
    columns = tl.arange(0, BLOCK_D)
    for base in tl.range(start, end, BLOCK_S):
        row = base + tl.arange(0, BLOCK_S)
        mask = (row < end)[:, None] & (columns < HEAD_SIZE)[None, :]
        zero = tl.zeros([BLOCK_S, BLOCK_D], ELEMENT)
        tl.store(pool + row[:, None] * HEAD_SIZE + columns[None, :], zero, mask=mask)
