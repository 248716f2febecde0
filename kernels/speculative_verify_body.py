"""`SpeculativeVerify` in standard operators, put together from the parts that a mode needs.

Drafts may be none (K = 0) and sequences ragged. Scans over the vocabulary that onnxruntime does one element at a time
(ArgMax, CumSum) work on groups first, where the vocabulary's size allows it: 128 or 32 tokens, else one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsc.kernels.function_text import parse_function
from dsc.kernels.speculative_verify import SPECULATIVE_VERIFY, input_names
from dsc.kernels.speculative_verify_penalties import PENALTY_STEPS
from dsc.kernels.speculative_verify_rules import LARGEST_UNIFORM
from dsc.kernels.speculative_verify_target import TARGET_STEPS

if TYPE_CHECKING:
    import onnx_ir as ir

_DRAFTS = """
  zero = Constant <value_int = 0> ()
  one = Constant <value_int = 1> ()
  axis0 = Constant <value_ints = [0]> ()
  axis1 = Constant <value_ints = [1]> ()
  axis2 = Constant <value_ints = [2]> ()
  zero_f = Constant <value_float = 0.0> ()
  one_f = Constant <value_float = 1.0> ()
  batch1 = Shape <start = 0, end = 1> (draft_ids)
  n_drafts1 = Shape <start = 1, end = 2> (draft_ids)
  n_drafts = Squeeze (n_drafts1)
  vocab1 = Shape <start = 2, end = 3> (logits)
  vocab = Squeeze (vocab1)
  column_shape = Concat <axis = 0> (batch1, axis1)
  lengths = Cast <to = 7> (draft_lengths)
  lengths_column = Unsqueeze (lengths, axis1)
  steps = Range (zero, n_drafts, one)
  proposed = Less (steps, lengths_column)
  wide = Constant <value_int = 128> ()
  narrow = Constant <value_int = 32> ()
  over_wide = Mod (vocab, wide)
  over_narrow = Mod (vocab, narrow)
  fits_wide = Equal (over_wide, zero)
  fits_narrow = Equal (over_narrow, zero)
  group_narrow = Where (fits_narrow, narrow, one)
  group = Where (fits_wide, wide, group_narrow)
  group1 = Unsqueeze (group, axis0)
"""

_BEST = """
  copied = Constant <value_ints = [0, 0, -1]> ()
  grouped_shape = Concat <axis = 0> (copied, group1)
  grouped = Reshape (logits, grouped_shape)
  axis3 = Constant <value_ints = [3]> ()
  tops = ReduceMax <keepdims = 0> (grouped, axis3)
  top_group = ArgMax <axis = 2, keepdims = 1> (tops)
  members = GatherND <batch_dims = 2> (grouped, top_group)
  member = ArgMax <axis = 2, keepdims = 0> (members)
  top_group2 = Squeeze (top_group, axis2)
  group_start = Mul (top_group2, group)
  best = Add (group_start, member)
  best_for_drafts = Slice (best, axis0, n_drafts1, axis1)
  hits = Equal (best_for_drafts, draft_ids)
  passes = And (hits, proposed)
"""

# The first draft that fails ends the prefix; a column past the last draft always does.
_FIRST_FAILURE = """
  failures = Not (passes)
  failures_i = Cast <to = 6> (failures)
  one_i = Constant <value_int = 1> ()
  one_i32 = Cast <to = 6> (one_i)
  end_column = Expand (one_i32, column_shape)
  failures_ended = Concat <axis = 1> (failures_i, end_column)
  n_column = ArgMax <axis = 1, keepdims = 1> (failures_ended)
"""

_GREEDY_NEXT = "  next_column = GatherElements <axis = 1> (best, n_column)"

_OUTPUTS = """
  n = Squeeze (n_column, axis1)
  n_accepted = Cast <to = 6> (n)
  next_token = Squeeze (next_column, axis1)
  rejected = Less (n, lengths)
  cause = Cast <to = 6> (rejected)
"""

_TESTS = f"""
  uniform_limit = Constant <value_float = {LARGEST_UNIFORM!r}> ()
  u = Min (uniforms, uniform_limit)
  u_tests = Slice (u, axis0, n_drafts1, axis1)
  last_token = Sub (vocab, one)
  safe = Clip (draft_ids, zero, last_token)
  known = Equal (safe, draft_ids)
  valid = And (known, proposed)
  safe3 = Unsqueeze (safe, axis2)
  p_draft3 = GatherElements <axis = 2> (p, safe3)
  p_draft2 = Squeeze (p_draft3, axis2)
  p_draft = Where (valid, p_draft2, zero_f)
"""

_POINT_MASS_TEST = "  passes = Less (u_tests, p_draft)"

_Q_SPARSE = """
  q_shape = Concat <axis = 0> (batch1, n_drafts1, vocab1)
  q_empty = Expand (zero_f, q_shape)
  q_dense = ScatterElements <axis = 2, reduction = "add"> (q_empty, q_ids, q)
"""
_Q_DENSE = "  q_dense = Identity (q)"
_Q_DRAFT = """
  q_draft3 = GatherElements <axis = 2> (q_dense, safe3)
  q_draft = Squeeze (q_draft3, axis2)
"""
_TOKEN_TEST = """
  scaled_q = Mul (u_tests, q_draft)
  passes = Less (scaled_q, p_draft)
"""

# Column 0 stands for the empty prefix: weight 1, always accepted.
_BLOCK_TEST = """
  unit_column = Expand (one_f, column_shape)
  zero_column = Expand (zero_f, column_shape)
  p_joined = Concat <axis = 1> (unit_column, p_draft)
  q_joined = Concat <axis = 1> (unit_column, q_draft)
  unit = Squeeze (unit_column, axis1)
  last_weight, weights_of = Scan <
    num_scan_inputs = 2, scan_input_axes = [1, 1], scan_output_axes = [1],
    body = weigh (float[batch] carried, float[batch] p_here, float[batch] q_here)
        => (float[batch] carry, float[batch] weight) {
      joint = Mul (carried, p_here)
      some = Greater (joint, zero_f)
      ratio = Div (joint, q_here)
      bounded = Min (ratio, one_f)
      carry = Where (some, bounded, zero_f)
      weight = Identity (carry)
    }> (unit, p_joined, q_joined)
  weights_before = Slice (weights_of, axis0, n_drafts1, axis1)
  weights_before3 = Unsqueeze (weights_before, axis2)
  p_before = Slice (p, axis0, n_drafts1, axis1)
  p_weighted = Mul (p_before, weights_before3)
  p_over_q = Sub (p_weighted, q_dense)
  left_over = Relu (p_over_q)
  left_mass = ReduceSum <keepdims = 0> (left_over, axis2)
  left = Concat <axis = 1> (left_mass, zero_column)
  failed_weight = Sub (one_f, weights_of)
  denominator = Add (left, failed_weight)
  divisible = Greater (denominator, zero_f)
  quotient = Div (left, denominator)
  inner_share = Where (divisible, quotient, one_f)
  n_rows = Add (n_drafts, one)
  prefixes = Range (zero, n_rows, one)
  inner = Less (prefixes, lengths_column)
  share = Where (inner, inner_share, weights_of)
  always_column = Neg (unit_column)
  u_prefix = Concat <axis = 1> (always_column, u_tests)
  below = Less (u_prefix, share)
  within = LessOrEqual (prefixes, lengths_column)
  holds = And (below, within)
  held_prefixes = Where (holds, prefixes, zero)
  n_column = ReduceMax <keepdims = 1> (held_prefixes, axis1)
"""

_ROW = "  p_row = GatherND <batch_dims = 1> (p, n_column)"

# Index -1 stands for no rejected draft: the last token's weight is then written back as it was.
_POINT_MASS_RESIDUAL = """
  none = Constant <value_int = -1> ()
  removable = Where (valid, safe, none)
  none_column = Expand (none, column_shape)
  removable_ended = Concat <axis = 1> (removable, none_column)
  removed = GatherElements <axis = 1> (removable_ended, n_column)
  removed_p = GatherElements <axis = 1> (p_row, removed)
  stays = Less (removed, zero)
  rest_p = Where (stays, removed_p, zero_f)
  weights_left = ScatterElements <axis = 1> (p_row, removed, rest_p)
"""

# A product with a row of one 1 takes the rejected draft's q, or zeros where no draft was rejected.
_RESIDUAL = """
  at_n = Equal (steps, n_column)
  picked = And (at_n, proposed)
  picked_f = Cast <to = 1> (picked)
  picked3 = Unsqueeze (picked_f, axis1)
  q_row3 = MatMul (picked3, q_dense)
  q_row = Squeeze (q_row3, axis1)
  difference = Sub ({p_row}, q_row)
  weights_left = Relu (difference)
"""
_BLOCK_ROW = """
  kept_weight = GatherElements <axis = 1> (weights_of, n_column)
  p_row_weighted = Mul (p_row, kept_weight)
"""

# Inverse of the cumulative weights in two levels; in double, so that a long tail of small weights is not lost.
_DRAW = """
  mass = ReduceSum <keepdims = 1> (weights_left, axis1)
  some_left = Greater (mass, zero_f)
  none_left = Not (some_left)
  none_left_f = Cast <to = 1> (none_left)
  p_fallback = Mul (p_row, none_left_f)
  weights = Add (weights_left, p_fallback)
  minus_one = Constant <value_ints = [-1]> ()
  weight_shape = Concat <axis = 0> (batch1, minus_one, group1)
  weight_groups = Reshape (weights, weight_shape)
  group_mass_f = ReduceSum <keepdims = 0> (weight_groups, axis2)
  group_mass = Cast <to = 11> (group_mass_f)
  group_reach = CumSum (group_mass, one)
  end = Constant <value_ints = [9223372036854775807]> ()
  all_mass = Slice (group_reach, minus_one, end, axis1)
  u_draw_f = Gather <axis = 1> (u, n_drafts1)
  u_draw = Cast <to = 11> (u_draw_f)
  mark = Mul (u_draw, all_mass)
  group_over = Greater (group_reach, mark)
  group_over_i = Cast <to = 6> (group_over)
  chosen_group = ArgMax <axis = 1, keepdims = 1> (group_over_i)
  chosen_reach = GatherElements <axis = 1> (group_reach, chosen_group)
  chosen_mass = GatherElements <axis = 1> (group_mass, chosen_group)
  mass_before = Sub (chosen_reach, chosen_mass)
  inner_mark = Sub (mark, mass_before)
  chosen_f = GatherND <batch_dims = 1> (weight_groups, chosen_group)
  chosen_d = Cast <to = 11> (chosen_f)
  inner_reach = CumSum (chosen_d, one)
  inner_end = Slice (inner_reach, minus_one, end, axis1)
  over_mark = Greater (inner_reach, inner_mark)
  at_end = GreaterOrEqual (inner_reach, inner_end)
  inner_over = Or (over_mark, at_end)
  inner_over_i = Cast <to = 6> (inner_over)
  chosen_member = ArgMax <axis = 1, keepdims = 1> (inner_over_i)
  chosen_start = Mul (chosen_group, group)
  next_column = Add (chosen_start, chosen_member)
"""


def function_body(mode: str, sparse: bool = False, penalties: bool = False) -> ir.Function:
    """The operator for one mode, with the proposal's support given when `sparse`."""
    names = list(input_names(mode, sparse))
    parts = [_DRAFTS, *_parts(mode, sparse), _OUTPUTS]
    if penalties:  # they come last, whatever is left out before them
        names = [role.name for role in SPECULATIVE_VERIFY.inputs]
        names[0], parts[0] = "given_logits", _DRAFTS.replace("(logits)", "(given_logits)") + PENALTY_STEPS
    body = "\n".join(parts)
    signature = f"SpeculativeVerify <mode> ({', '.join(names)}) => (n_accepted, next_token, cause)"
    return parse_function(f"{signature} {{\n{body}\n}}")


def _parts(mode: str, sparse: bool) -> list[str]:
    if mode == "greedy":
        return [_BEST, _FIRST_FAILURE, _GREEDY_NEXT]
    if mode == "deterministic":
        return [TARGET_STEPS, _TESTS, _POINT_MASS_TEST, _FIRST_FAILURE, _ROW, _POINT_MASS_RESIDUAL, _DRAW]
    q = [TARGET_STEPS, _TESTS, _Q_SPARSE if sparse else _Q_DENSE, _Q_DRAFT]
    if mode == "block":
        return [*q, _BLOCK_TEST, _ROW, _BLOCK_ROW, _RESIDUAL.format(p_row="p_row_weighted"), _DRAW]
    return [*q, _TOKEN_TEST, _FIRST_FAILURE, _ROW, _RESIDUAL.format(p_row="p_row"), _DRAW]
