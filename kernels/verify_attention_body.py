"""`VerifyAttention` in standard operators: what runs where no kernel does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dsc.kernels.function_text import parse_function

if TYPE_CHECKING:
    import onnx_ir as ir

# Every step of the body is a standard operator; keys past the longest sequence are never read. Of a row of a pool the
# newest position is meant that lies there; it is negative where nothing does yet.
_BODY = """
VerifyAttention <scale: float = 1.0, window: int = -1, softcap: float = 0.0>
  (q, k, v, k_pool, v_pool, past_lengths{parameters}) => (o, k_pool_out, v_pool_out) {{
  zero = Constant <value_int = 0> ()
  one = Constant <value_int = 1> ()
  axis0 = Constant <value_ints = [0]> ()
  axis2 = Constant <value_ints = [2]> ()
  axes_head = Constant <value_ints = [1, 3]> ()
  axes_row = Constant <value_ints = [1, 2]> ()
  n_rows1 = Shape <start = 2, end = 3> (q)
  n_rows = Squeeze (n_rows1)
  head1 = Shape <start = 3, end = 4> (q)
  kv_heads1 = Shape <start = 1, end = 2> (k)
  batch1 = Shape <start = 0, end = 1> (q)
  pool_rows1 = Shape <start = 2, end = 3> (k_pool)
  pool_rows = Squeeze (pool_rows1)
  past = Cast <to = 7> (past_lengths)
  offsets = Range (zero, n_rows, one)
{placing}
  before = Sub (newest, key_rows)
  age = Mod (before, pool_rows)
  key_positions = Sub (newest, age)
  keys = Unsqueeze (keys4, axis2)
  values = Unsqueeze (values4, axis2)
  minus_one = Constant <value_ints = [-1]> ()
  grouped = Concat <axis = 0> (batch1, kv_heads1, minus_one, n_rows1, head1)
  q5 = Reshape (q, grouped)
  keys_t = Transpose <perm = [0, 1, 2, 4, 3]> (keys)
  products = MatMul (q5, keys_t)
  factor_f = Constant <value_float: float = @scale> ()
  factor = CastLike (factor_f, q)
  scaled = Mul (products, factor)
  cap_f = Constant <value_float: float = @softcap> ()
  zero_f = Constant <value_float = 0.0> ()
  one_f = Constant <value_float = 1.0> ()
  capped = Greater (cap_f, zero_f)
  cap_safe = Where (capped, cap_f, one_f)
  cap = CastLike (cap_safe, q)
  ratio = Div (scaled, cap)
  bent = Tanh (ratio)
  limited = Mul (bent, cap)
  scores = Where (capped, limited, scaled)
  rows_column = Unsqueeze (rows, axis2)
  not_later = LessOrEqual (key_positions, rows_column)
  width = Constant <value_int: int = @window> ()
  no_window = Less (width, zero)
  first = Sub (rows_column, width)
  in_window = Greater (key_positions, first)
  near = Or (in_window, no_window)
  written = GreaterOrEqual (key_positions, zero)
  known = And (not_later, written)
  seen0 = And (known, near)
{tree}
{among}
  seen5 = Unsqueeze (seen, axes_row)
  lowest_f = Constant <value_float = -inf> ()
  lowest = CastLike (lowest_f, q)
  masked = Where (seen5, scores, lowest)
{softmax}
  mixed = MatMul (weights, values)
  out_shape = Shape (q)
  o = Reshape (mixed, out_shape)
}}
"""

# Positions of the rows [B, S], the rows of the keys and the newest position in their pool, the pools with the new rows.
_BATCH = """
  past_column = Unsqueeze (past, one)
  rows = Add (past_column, offsets)
  places = Mod (rows, pool_rows)
  rows4 = Unsqueeze (places, axes_head)
  new_shape = Shape (k)
  at = Expand (rows4, new_shape)
  k_pool_out = ScatterElements <axis = 2> (k_pool, at, k)
  v_pool_out = ScatterElements <axis = 2> (v_pool, at, v)
  longest = ReduceMax <keepdims = 0> (past)
  longest_end = Add (longest, n_rows)
  total = Min (longest_end, pool_rows)
  total1 = Unsqueeze (total, axis0)
  keys4 = Slice (k_pool_out, axis0, total1, axis2)
  values4 = Slice (v_pool_out, axis0, total1, axis2)
  key_rows = Range (zero, total, one)
  end_column = Add (past_column, n_rows)
  newest_column = Sub (end_column, one)
  newest = Unsqueeze (newest_column, axis2)
  first_column = Sub (past_column, past_column)
"""

# Packed rows see the keys of all slots side by side; a mask keeps each to its own slot.
_PACKED = """
  axis3 = Constant <value_ints = [3]> ()
  starts_ends = Cast <to = 7> (row_offsets)
  last_one = Constant <value_ints = [-1]> ()
  after_first = Constant <value_ints = [1]> ()
  far = Constant <value_ints = [2147483647]> ()
  starts = Slice (starts_ends, axis0, last_one)
  ends = Slice (starts_ends, after_first, far)
  offset_column = Unsqueeze (offsets, one)
  over = LessOrEqual (ends, offset_column)
  over_int = Cast <to = 7> (over)
  slot = ReduceSum <keepdims = 0> (over_int, after_first)
  past_rows = Gather (past, slot)
  start_rows = Gather (starts, slot)
  own = Sub (offsets, start_rows)
  rows1 = Add (past_rows, own)
  rows = Unsqueeze (rows1, zero)
  past_column = Unsqueeze (past_rows, one)
  first_column = Unsqueeze (start_rows, one)
  slot3 = Unsqueeze (slot, axes_row)
  places = Mod (rows1, pool_rows)
  row3 = Unsqueeze (places, axes_row)
  kv_heads = Squeeze (kv_heads1)
  every_head = Range (zero, kv_heads, one)
  head_axes = Constant <value_ints = [0, 2]> ()
  head3 = Unsqueeze (every_head, head_axes)
  one1 = Unsqueeze (one, axis0)
  index_shape = Concat <axis = 0> (n_rows1, kv_heads1, one1)
  slot_at = Expand (slot3, index_shape)
  head_at = Expand (head3, index_shape)
  row_at = Expand (row3, index_shape)
  at = Concat <axis = 2> (slot_at, head_at, row_at)
  k3 = Squeeze (k, axis0)
  v3 = Squeeze (v, axis0)
  k_rows = Transpose <perm = [1, 0, 2]> (k3)
  v_rows = Transpose <perm = [1, 0, 2]> (v3)
  k_pool_out = ScatterND (k_pool, at, k_rows)
  v_pool_out = ScatterND (v_pool, at, v_rows)
  k_heads = Transpose <perm = [1, 0, 2, 3]> (k_pool_out)
  v_heads = Transpose <perm = [1, 0, 2, 3]> (v_pool_out)
  all_keys = Constant <value_ints = [-1]> ()
  flat = Concat <axis = 0> (one1, kv_heads1, all_keys, head1)
  keys4 = Reshape (k_heads, flat)
  values4 = Reshape (v_heads, flat)
  total1 = Shape <start = 2, end = 3> (keys4)
  total = Squeeze (total1)
  every_key = Range (zero, total, one)
  key_slots = Div (every_key, pool_rows1)
  key_rows = Mod (every_key, pool_rows1)
  counts = Sub (ends, starts)
  slot_ends = Add (past, counts)
  slot_newest = Sub (slot_ends, one)
  newest = Gather (slot_newest, key_slots)
"""

_ALL_SLOTS = "  seen = Identity (seen1)"
_OWN_SLOT = """
  slot_column = Unsqueeze (slot, one)
  same_slot = Equal (key_slots, slot_column)
  seen = And (seen1, same_slot)
"""

_NO_TREE = "  seen1 = Identity (seen0)"
# The mask speaks of the new rows; every older key counts as an ancestor.
_TREE = """
  axis1 = Constant <value_ints = [1]> ()
  tree3 = Squeeze (tree_mask, axis1)
  past3 = Unsqueeze (past_column, {axis})
  first3 = Unsqueeze (first_column, {axis})
  relative = Sub (key_positions, past3)
  older = Less (relative, zero)
  among_rows = Add (relative, first3)
  last = Sub (n_rows, one)
  inside = Clip (among_rows, zero, last)
  tree_shape = Concat <axis = 0> (batch1, n_rows1, total1)
  tree_at = Expand (inside, tree_shape)
  ancestor = GatherElements <axis = 2> (tree3, tree_at)
  allowed = Or (ancestor, older)
  seen1 = And (seen0, allowed)
"""

_NO_SINKS = "  weights = Softmax <axis = -1> (masked)"
_SINKS = """
  sink_shape = Concat <axis = 0> (axis_one1, kv_heads1, minus_one, axis_one1, axis_one1)
  sinks_like_q = CastLike (sinks, q)
  sink5 = Reshape (sinks_like_q, sink_shape)
  column_shape0 = Shape <start = 0, end = 4> (masked)
  column_shape = Concat <axis = 0> (column_shape0, axis_one1)
  sink_column = Expand (sink5, column_shape)
  extended = Concat <axis = 4> (masked, sink_column)
  all_weights = Softmax <axis = -1> (extended)
  axis4 = Constant <value_ints = [4]> ()
  weights = Slice (all_weights, axis0, total1, axis4)
"""


OPTIONAL = {"sinks": 6, "tree_mask": 7, "row_offsets": 8}
"""Optional inputs of the operator and where they stand."""


def function_body(has_sinks: bool = False, has_tree: bool = False, packed: bool = False) -> ir.Function:
    """The operator in standard operators, for graphs whose nodes have these optional inputs.

    Any number of sequences and rows; costs a copy of the pools a call, so it is what runs only where no
    kernel does.
    """
    softmax = "  axis_one1 = Constant <value_ints = [1]> ()" + _SINKS if has_sinks else _NO_SINKS
    text = _BODY.format(
        parameters=parameters(has_sinks, has_tree, packed),
        placing=_PACKED if packed else _BATCH,
        tree=_TREE.format(axis="axis0" if packed else "axis2") if has_tree else _NO_TREE,
        among=_OWN_SLOT if packed else _ALL_SLOTS,
        softmax=softmax,
    )
    return parse_function(text)


def parameters(has_sinks: bool, has_tree: bool, packed: bool) -> str:
    """The optional inputs in a body's text: all up to the last one in use."""
    used = [has_sinks, has_tree, packed]
    return "".join(f", {name}" for index, name in enumerate(OPTIONAL) if any(used[index:]))


def function_for(node: ir.Node, body: Callable[..., ir.Function] = function_body) -> ir.Function:
    """The body that fits a node's optional inputs; its overload is named after them."""
    here = [len(node.inputs) > index and node.inputs[index] is not None for index in OPTIONAL.values()]
    function = body(*here)
    names = [name for name, used in zip(("sinks", "tree", "packed"), here, strict=True) if used]
    function.overload = "_".join(names) or "plain"
    return function
