"""Penalties of `SpeculativeVerify`: each row's logits, given what the sequence has before that row.

Row i follows the history and the first i drafts, so the rows of one block have different histories, the ones that plain
decoding would have. Both forms compute in float32, operation by operation, and agree to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsc.kernels.contract import Array


def penalised_logits(logits: Array, drafts: Sequence[int], history: Array, n_prompt: int, penalties: Array) -> Array:
    """The logits [R, V] that one sequence's tokens are chosen by.

    Args:
        logits: float32 [R, V].
        drafts: [>= R - 1] those of the rows.
        history: [H] the tokens so far, prompt first; ids outside the vocabulary are padding.
        n_prompt: how many of them are the prompt's.
        penalties: float32 [3]. Repetition: logits of tokens seen in prompt or output are divided (positive) or
            multiplied (negative) by it (Keskar et al. 2019, CTRL). Presence: subtracted once from those of tokens in
            the output. Frequency: subtracted for each time they occur there.
    """
    repetition, presence, frequency = (np.float32(value) for value in penalties)
    vocab = logits.shape[1]
    seen, counts = _count(history, vocab), _count(history[n_prompt:], vocab)
    rows = []
    for i, row in enumerate(logits):
        if i > 0 and 0 <= drafts[i - 1] < vocab:
            seen[drafts[i - 1]] += 1
            counts[drafts[i - 1]] += 1
        scaled = np.where(row > 0, row / repetition, row * repetition)
        penalty = presence * (counts > 0).astype(np.float32) + frequency * counts
        rows.append(np.where(seen > 0, scaled, row) - penalty)
    return np.stack(rows)


def _count(tokens: Array, vocab: int) -> Array:
    counts = np.zeros(vocab, np.float32)
    np.add.at(counts, tokens[(tokens >= 0) & (tokens < vocab)], 1)
    return counts


# A product with a lower triangle of ones counts the drafts before each row.
PENALTY_STEPS = """
  no_penalty = Constant <value_floats = [1.0, 0.0, 0.0]> ()
  unpenalised = Equal (penalties, no_penalty)
  penalised = Not (unpenalised)
  penalised_i = Cast <to = 6> (penalised)
  penalised_max = ReduceMax <keepdims = 0> (penalised_i)
  penalising = Cast <to = 9> (penalised_max)
  logits = If (penalising) <
    then_branch = with_penalties () => (float[batch, rows, vocab] penalised_logits) {
      highest_id = Sub (vocab, one)
      history_safe = Clip (history, zero, highest_id)
      history_known = Equal (history_safe, history)
      history_weight = Cast <to = 1> (history_known)
      one_row = Concat <axis = 0> (batch1, vocab1)
      nothing = Expand (zero_f, one_row)
      seen_counts = ScatterElements <axis = 1, reduction = "add"> (nothing, history_safe, history_weight)
      history1 = Shape <start = 1, end = 2> (history)
      history_end = Squeeze (history1)
      positions = Range (zero, history_end, one)
      prompt64 = Cast <to = 7> (prompt_lengths)
      prompt_column = Unsqueeze (prompt64, axis1)
      in_output = GreaterOrEqual (positions, prompt_column)
      in_output_f = Cast <to = 1> (in_output)
      output_weight = Mul (history_weight, in_output_f)
      output_counts = ScatterElements <axis = 1, reduction = "add"> (nothing, history_safe, output_weight)
      drafts_safe = Clip (draft_ids, zero, highest_id)
      drafts_known = Equal (drafts_safe, draft_ids)
      drafts_weight = Cast <to = 1> (drafts_known)
      drafts_at3 = Unsqueeze (drafts_safe, axis2)
      drafts_weight3 = Unsqueeze (drafts_weight, axis2)
      block_shape = Concat <axis = 0> (batch1, n_drafts1, vocab1)
      no_drafts = Expand (zero_f, block_shape)
      one_hot = ScatterElements <axis = 2, reduction = "add"> (no_drafts, drafts_at3, drafts_weight3)
      rows_end = Add (n_drafts, one)
      row_numbers = Range (zero, rows_end, one)
      row_column = Unsqueeze (row_numbers, axis1)
      before = Less (steps, row_column)
      before_f = Cast <to = 1> (before)
      draft_counts = MatMul (before_f, one_hot)
      seen_counts3 = Unsqueeze (seen_counts, axis1)
      output_counts3 = Unsqueeze (output_counts, axis1)
      seen_rows = Add (seen_counts3, draft_counts)
      counts = Add (output_counts3, draft_counts)
      seen = Greater (seen_rows, zero_f)
      used = Greater (counts, zero_f)
      used_f = Cast <to = 1> (used)
      penalties3 = Unsqueeze (penalties, axis1)
      first = Constant <value_ints = [0]> ()
      second = Constant <value_ints = [1]> ()
      third = Constant <value_ints = [2]> ()
      repetition = Gather <axis = 2> (penalties3, first)
      presence = Gather <axis = 2> (penalties3, second)
      frequency = Gather <axis = 2> (penalties3, third)
      divided = Div (given_logits, repetition)
      multiplied = Mul (given_logits, repetition)
      positive = Greater (given_logits, zero_f)
      scaled_logits = Where (positive, divided, multiplied)
      repeated = Where (seen, scaled_logits, given_logits)
      present = Mul (presence, used_f)
      frequent = Mul (frequency, counts)
      penalty = Add (present, frequent)
      penalised_logits = Sub (repeated, penalty)
    },
    else_branch = without_penalties () => (float[batch, rows, vocab] same_logits) {
      same_logits = Identity (given_logits)
    }>
"""
