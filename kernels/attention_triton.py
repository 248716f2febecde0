# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, name-defined, misc"
# ruff: noqa: N803
"""Head-level-tiled verification attention in Triton: S new rows attend to a sequence's whole KV in one pass.

One program holds the query rows of every head that shares one KV head (``groups * S`` rows packed into
tiles of BLOCK_M), so each key and value is read from memory once, whatever the number of draft rows. The KV
length is cut into as many parts as the launch's grid has in z; a second kernel joins the parts. The new
rows take part from their own buffers and are written to the pool by the program that owns the last part, so
no program waits for another. Softmax is online, in fp32, base 2 (FlashAttention-2, arXiv 2307.08691; split
KV as in Flash-Decoding).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(q, k, scale, cap, SOFTCAP: tl.constexpr):
    """Scaled (and soft-capped) scores of a tile, times log2(e): [BLOCK_M, keys]."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1), which neither overflows nor loses its limits.
        s = cap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E) / cap) + 1.0))
    return s * LOG2E


@triton.jit
def _accumulate(s, visible, v, best, total, acc):
    """One step of the online softmax: the running maximum, denominator and weighted sum of values."""
    s = tl.where(visible, s, float("-inf"))
    new_best = tl.maximum(best, tl.max(s, 1))
    # A row that has seen no key yet has maximum -inf; subtracting it from itself would give NaN.
    anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
    p = tl.exp2(s - anchor[:, None])
    shrink = tl.exp2(best - anchor)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_best, total, acc


@triton.jit
def _on_grid(x, scale, QUANTISED: tl.constexpr):
    """New K or V rows, rounded (half up) to the pool's int8 grid where it has one."""
    if QUANTISED:
        # A plain quotient is rounded less exactly on a GPU, and would put some rows on the other side of a half.
        x = tl.floor(tl.div_rn(x.to(tl.float32), scale) + 0.5)
        x = tl.minimum(tl.maximum(x, -127.0), 127.0)
    return x


@triton.jit
def _packed_row(slot, kv_head, kv_heads, groups, S, BLOCK_M: tl.constexpr):
    """Query rows of this program's tile: (is real, step s, query head, row of q and o)."""
    packed = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q_head = kv_head * groups + packed // S
    row = (slot * kv_heads * groups + q_head) * S + packed % S
    return packed < groups * S, packed % S, q_head, row


@triton.jit
def _pool_keys(past, window, part, parts, BLOCK_N: tl.constexpr):
    """First and end key of a part of the pool: whole tiles, from the oldest key that any of the rows sees."""
    first = tl.where(window > 0, tl.maximum(past + 1 - window, 0), 0)
    share = tl.cdiv(tl.cdiv(past - first, parts), BLOCK_N) * BLOCK_N
    start = first + part * share
    return start, tl.minimum(start + share, past)


@triton.jit
def _store_rows(
    o_ptr,
    part_ptr,
    stat_ptr,
    sinks_ptr,
    has_sinks,
    q_head,
    row,
    real,
    columns,
    inside,
    best,
    total,
    acc,
    HEAD_SIZE: tl.constexpr,
):
    """Write rows: finished when there is one part, else its unnormalised sum, maximum and denominator."""
    part, parts = tl.program_id(2), tl.num_programs(2)
    mask = real[:, None] & inside[None, :]
    if parts == 1:
        if has_sinks != 0:
            sink = tl.load(sinks_ptr + q_head, mask=real, other=0.0) * LOG2E
            total += tl.exp2(sink - best)
        out = acc / tl.where(real, total, 1.0)[:, None]
        tl.store(o_ptr + row[:, None] * HEAD_SIZE + columns[None, :], out.to(o_ptr.dtype.element_ty), mask=mask)
    else:
        cell = row.to(tl.int64) * parts + part
        tl.store(part_ptr + cell[:, None] * HEAD_SIZE + columns[None, :], acc, mask=mask)
        tl.store(stat_ptr + cell * 2, best, mask=real)
        tl.store(stat_ptr + cell * 2 + 1, total, mask=real)


@triton.jit
def _attend_new(
    q, k_ptr, v_ptr, k_pool, v_pool, tree_ptr, head, slot, past, step, real, oldest, S, has_tree, scale, cap,
    k_scale, v_scale, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr, SOFTCAP: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    """Attend to the new rows and write them to the pool: (maximum, denominator, weighted sum) so far.

    They belong to the last part; the other parts compute a masked tile rather than branch around it.
    """
    new, columns = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    mine = (new < S) & (tl.program_id(2) == tl.num_programs(2) - 1)
    valid = mine[:, None] & (columns < HEAD_SIZE)[None, :]
    at = (head * S + new)[:, None] * HEAD_SIZE + columns[None, :]
    k = _on_grid(tl.load(k_ptr + at, mask=valid, other=0.0), k_scale, QUANTISED)
    v = _on_grid(tl.load(v_ptr + at, mask=valid, other=0.0), v_scale, QUANTISED)
    seen = mine[None, :] & (new[None, :] <= step[:, None]) & ((past + new)[None, :] > oldest[:, None])
    if has_tree != 0:
        cell = (slot * S + step)[:, None] * S + new[None, :]
        seen = seen & (tl.load(tree_ptr + cell, mask=seen & real[:, None], other=0) != 0)
    to = (past + new)[:, None] * HEAD_SIZE + columns[None, :]
    written = valid & (tl.program_id(0) == 0)
    tl.store(k_pool + to, k.to(k_pool.dtype.element_ty), mask=written)
    tl.store(v_pool + to, v.to(v_pool.dtype.element_ty), mask=written)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    s = _scores(q, k.to(q.dtype), scale * k_scale, cap, SOFTCAP)
    return _accumulate(s, seen, v.to(q.dtype), best, total, acc)


@triton.jit
def verify_head_tiled(
    q_ptr, k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, past_ptr, sinks_ptr, tree_ptr, k_scale_ptr, v_scale_ptr,
    o_ptr, part_ptr, stat_ptr, S, pool_rows, kv_heads, groups, window, has_sinks, has_tree, scale, cap,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr, SOFTCAP: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(groups * S / BLOCK_M), B * kv_heads, parts); all tensors contiguous, see the contract."""
    head, part, parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    slot, kv_head = head // kv_heads, head % kv_heads
    past = tl.load(past_ptr + slot)
    real, step, q_head, row = _packed_row(slot, kv_head, kv_heads, groups, S, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < HEAD_SIZE
    at_q = row[:, None] * HEAD_SIZE + columns[None, :]
    q = tl.load(q_ptr + at_q, mask=real[:, None] & inside[None, :], other=0.0)
    k_scale, v_scale = 1.0, 1.0
    if QUANTISED:
        k_scale, v_scale = tl.load(k_scale_ptr + kv_head), tl.load(v_scale_ptr + kv_head)
    oldest = tl.where(window > 0, past + step - window, -1)
    # Offsets inside one head fit 32 bits; only the head's own start may not.
    k_pool = k_pool_ptr + head.to(tl.int64) * pool_rows * HEAD_SIZE
    v_pool = v_pool_ptr + head.to(tl.int64) * pool_rows * HEAD_SIZE
    best, total, acc = _attend_new(
        q, k_ptr, v_ptr, k_pool, v_pool, tree_ptr, head, slot, past, step, real, oldest, S, has_tree, scale,
        cap, k_scale, v_scale, HEAD_SIZE, BLOCK_D, BLOCK_M, BLOCK_S, SOFTCAP, QUANTISED,
    )  # fmt: skip
    start, end = _pool_keys(past, window, part, parts, BLOCK_N)
    for base in tl.range(start, end, BLOCK_N):
        keys = base + tl.arange(0, BLOCK_N)
        at = keys[:, None] * HEAD_SIZE + columns[None, :]
        held = (keys < end)[:, None] & inside[None, :]
        k = tl.load(k_pool + at, mask=held, other=0).to(q.dtype)
        s = _scores(q, k, scale * k_scale, cap, SOFTCAP)
        v = tl.load(v_pool + at, mask=held, other=0).to(q.dtype)
        seen = (keys < end)[None, :] & (keys[None, :] > oldest[:, None])
        best, total, acc = _accumulate(s, seen, v, best, total, acc)
    _store_rows(
        o_ptr, part_ptr, stat_ptr, sinks_ptr, has_sinks, q_head, row, real, columns, inside,
        best, total, acc * v_scale, HEAD_SIZE,
    )  # fmt: skip


@triton.jit
def join_parts(
    part_ptr, stat_ptr, sinks_ptr, o_ptr, parts, S, q_heads, has_sinks,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Grid (B * q_heads * S): join the parts of one output row by their maxima and denominators."""
    row = tl.program_id(0).to(tl.int64)
    lane, columns = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    inside = columns < HEAD_SIZE
    cell = row * parts + lane
    best = tl.load(stat_ptr + cell * 2, mask=lane < parts, other=float("-inf"))
    total = tl.load(stat_ptr + cell * 2 + 1, mask=lane < parts, other=0.0)
    # Every row sees at least itself, so the greatest maximum is finite.
    anchor = tl.max(best, 0)
    weight = tl.exp2(best - anchor)
    denominator = tl.sum(total * weight, 0)
    if has_sinks != 0:
        q_head = (row // S) % q_heads
        denominator += tl.exp2(tl.load(sinks_ptr + q_head) * LOG2E - anchor)
    at = cell[:, None] * HEAD_SIZE + columns[None, :]
    acc = tl.load(part_ptr + at, mask=(lane < parts)[:, None] & inside[None, :], other=0.0)
    out = tl.sum(acc * weight[:, None], 0) / denominator
    tl.store(o_ptr + row * HEAD_SIZE + columns, out.to(o_ptr.dtype.element_ty), mask=inside)
