"""`KvCommit` and `KvRollback`: what happens to a KV pool after a verdict, at the cost of an integer in the usual case.

A chain of drafts needs neither: accepted rows are where they belong and rejected ones are past the length. A tree's
accepted path is scattered over its rows and is moved together; rejected ranges are undone from a journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dsc.bundle_schema.errors import KernelError
from dsc.kernels.contract import Array, Axes, KernelContract, TensorRole
from dsc.kernels.function_text import parse_function

if TYPE_CHECKING:
    import onnx_ir as ir


def commit_reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """Row ``past_lengths[b] + path[b, i]`` of a pool [B, Hkv, M, D] becomes row ``past_lengths[b] + i``, i < counts[b].

    All rows are read before any is written, so source and target rows may overlap. Every other row stays as it is.
    """
    pool = inputs["pool"].copy()
    for b, (past, count) in enumerate(zip(inputs["past_lengths"], inputs["counts"], strict=True)):
        pool[b, :, past : past + count] = inputs["pool"][b][:, past + inputs["path"][b, :count]]
    return {"pool_out": pool}


def make_commit_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """Rising paths of random lengths, the first as long as can be; past them the path holds rows that do not exist."""
    rng = np.random.default_rng(seed)
    b, m, p = (axes[name] for name in ("B", "M", "P"))
    room = min(2 * p, m)
    counts = rng.integers(0, p + 1, b)
    counts[0] = p
    path = np.full((b, p), m + 5)
    for row, count in zip(path, counts, strict=True):
        row[:count] = np.sort(rng.permutation(room)[:count])
    return {
        "pool": rng.standard_normal((b, axes["Hkv"], m, axes["D"]), dtype=np.float32),
        "past_lengths": rng.integers(0, m - room + 1, b).astype(np.int32),
        "path": path.astype(np.int32),
        "counts": counts.astype(np.int32),
    }


def rollback_reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """Each journal entry (slot, start, end) undoes the rows [start, end) of a slot.

    A slot's length becomes the least start among its entries, if that is less, in whatever order they are replayed.
    Rows past the length are never read, so they are cleared only on request (`erase`).
    """
    lengths = inputs["lengths"].copy()
    np.minimum.at(lengths, inputs["journal"][:, 0], inputs["journal"][:, 1])
    if "pool" not in inputs:
        return {"lengths_out": lengths}
    pool = inputs["pool"].copy()
    if attributes.get("erase", 0):
        for slot, start, end in inputs["journal"]:
            pool[slot, :, start:end] = 0
    return {"lengths_out": lengths, "pool_out": pool}


def make_rollback_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """Entries in random order, several of one slot and none of others."""
    rng = np.random.default_rng(seed)
    b, m, e = (axes[name] for name in ("B", "M", "E"))
    start = rng.integers(0, m, e)
    end = np.minimum(start + rng.integers(1, 5, e), m)
    return {
        "lengths": rng.integers(0, m + 1, b).astype(np.int32),
        "journal": np.stack([rng.integers(0, max(b - 1, 1), e), start, end], axis=1).astype(np.int32),
        "pool": rng.standard_normal((b, axes["Hkv"], m, axes["D"]), dtype=np.float32),
    }


_POOL = TensorRole("pool", ("B", "Hkv", "M", "D"))
_POOL_OUT = TensorRole("pool_out", ("B", "Hkv", "M", "D"))
_AXES = {"B": "slots", "Hkv": "key and value heads", "M": "rows of a pool", "D": "head size"}

KV_COMMIT = KernelContract(
    name="KvCommit",
    axes={**_AXES, "P": "rows of the longest path"},
    inputs=(
        _POOL,
        TensorRole("past_lengths", ("B",), "int32"),
        TensorRole("path", ("B", "P"), "int32"),
        TensorRole("counts", ("B",), "int32"),
    ),
    outputs=(_POOL_OUT,),
    reference=commit_reference,
    make_inputs=make_commit_inputs,
    nbytes=lambda axes: 8 * axes["B"] * axes["Hkv"] * axes["P"] * axes["D"],
    flops=lambda axes: 0,
    example={"B": 3, "Hkv": 2, "M": 23, "D": 5, "P": 4},
)

KV_ROLLBACK = KernelContract(
    name="KvRollback",
    axes={**_AXES, "E": "journal entries"},
    inputs=(
        TensorRole("lengths", ("B",), "int32"),
        TensorRole("journal", ("E", 3), "int32"),
        TensorRole("pool", _POOL.axes, optional=True),
    ),
    outputs=(TensorRole("lengths_out", ("B",), "int32"), TensorRole("pool_out", _POOL.axes, optional=True)),
    attributes={"erase": "1: the undone rows become zero (secure rollback)"},
    reference=rollback_reference,
    make_inputs=make_rollback_inputs,
    nbytes=lambda axes: 16 * axes["E"],
    flops=lambda axes: 0,
    example={"B": 3, "Hkv": 2, "M": 17, "D": 12, "E": 5},
)

# A gather over all rows, each from itself but for the path's: rows that are written twice cannot arise.
_COMMIT = """
KvCommit (pool, past_lengths, path, counts) => (pool_out) {
  zero = Constant <value_int = 0> ()
  one = Constant <value_int = 1> ()
  axis1 = Constant <value_ints = [1]> ()
  axes_index = Constant <value_ints = [1, 3]> ()
  n_rows1 = Shape <start = 2, end = 3> (pool)
  n_rows = Squeeze (n_rows1)
  batch1 = Shape <start = 0, end = 1> (pool)
  path_end1 = Shape <start = 1, end = 2> (path)
  path_end = Squeeze (path_end1)
  rows = Range (zero, n_rows, one)
  past = Cast <to = 7> (past_lengths)
  past2 = Unsqueeze (past, axis1)
  offsets = Sub (rows, past2)
  count = Cast <to = 7> (counts)
  count2 = Unsqueeze (count, axis1)
  not_before = GreaterOrEqual (offsets, zero)
  not_after = Less (offsets, count2)
  moved = And (not_before, not_after)
  path64 = Cast <to = 7> (path)
  column_shape = Concat <axis = 0> (batch1, axis1)
  column = Expand (zero, column_shape)
  path_padded = Concat <axis = 1> (path64, column)
  path_at = Clip (offsets, zero, path_end)
  steps = GatherElements <axis = 1> (path_padded, path_at)
  from_path = Add (steps, past2)
  source = Where (moved, from_path, rows)
  source4 = Unsqueeze (source, axes_index)
  heads_shape0 = Shape <start = 0, end = 3> (pool)
  heads_shape = Concat <axis = 0> (heads_shape0, axis1)
  source_at = Expand (source4, heads_shape)
  pool_out = GatherND <batch_dims = 2> (pool, source_at)
}
"""

_LENGTHS = """
KvRollback <erase> (lengths, journal{parameters}) => (lengths_out{results}) {{
  zero = Constant <value_int = 0> ()
  one = Constant <value_int = 1> ()
  axis1 = Constant <value_ints = [1]> ()
  slots = Gather <axis = 1> (journal, zero)
  starts = Gather <axis = 1> (journal, one)
  lengths_out = ScatterElements <axis = 0, reduction = "min"> (lengths, slots, starts)
{pool}
}}
"""
_KEEP = "  pool_out = Identity (pool)"
_ERASE = """
  two = Constant <value_int = 2> ()
  axis0 = Constant <value_ints = [0]> ()
  axes_row = Constant <value_ints = [0, 1]> ()
  axes_slot = Constant <value_ints = [0, 2]> ()
  axes_entry = Constant <value_ints = [1, 2]> ()
  axes_pool = Constant <value_ints = [1, 3]> ()
  ends = Gather <axis = 1> (journal, two)
  batch1 = Shape <start = 0, end = 1> (pool)
  n_rows1 = Shape <start = 2, end = 3> (pool)
  batch = Squeeze (batch1)
  n_rows = Squeeze (n_rows1)
  all_rows = Range (zero, n_rows, one)
  all_slots = Range (zero, batch, one)
  row3 = Unsqueeze (all_rows, axes_row)
  slot3 = Unsqueeze (all_slots, axes_slot)
  slots64 = Cast <to = 7> (slots)
  starts64 = Cast <to = 7> (starts)
  ends64 = Cast <to = 7> (ends)
  slots3 = Unsqueeze (slots64, axes_entry)
  starts3 = Unsqueeze (starts64, axes_entry)
  ends3 = Unsqueeze (ends64, axes_entry)
  in_slot = Equal (slots3, slot3)
  not_before = GreaterOrEqual (row3, starts3)
  not_after = Less (row3, ends3)
  in_rows = And (not_before, not_after)
  undone = And (in_slot, in_rows)
  undone_i = Cast <to = 6> (undone)
  times = ReduceSum <keepdims = 0> (undone_i, axis0)
  gone = Cast <to = 9> (times)
  gone4 = Unsqueeze (gone, axes_pool)
  nothing_f = Constant <value_float = 0.0> ()
  nothing = CastLike (nothing_f, pool)
  pool_out = Where (gone4, nothing, pool)
"""


def commit_body() -> ir.Function:
    """`KvCommit` in standard operators; costs a copy of the pool, so it runs only where no kernel does."""
    return parse_function(_COMMIT)


def rollback_body(has_pool: bool, erase: bool) -> ir.Function:
    """`KvRollback` in standard operators; without a pool it is a change of lengths."""
    parameters, results = (", pool", ", pool_out") if has_pool else ("", "")
    pool = "" if not has_pool else _ERASE if erase else _KEEP
    return parse_function(_LENGTHS.format(parameters=parameters, results=results, pool=pool))


def function_for(node: ir.Node) -> ir.Function:
    """The body that fits a node of either operator.

    Raises:
        KernelError: rows are to be erased and no pool is given.
    """
    if node.op_type == "KvCommit":
        function, form = commit_body(), "plain"
    else:
        has_pool = len(node.inputs) > 2 and node.inputs[2] is not None
        erase = "erase" in node.attributes and bool(node.attributes["erase"].as_int())
        if erase and not has_pool:
            raise KernelError(f"KvRollback node {node.name!r}", "erase requires a pool")
        function = rollback_body(has_pool, erase)
        form = "erase" if erase else "keep" if has_pool else "lengths"
    function.overload = form
    return function
