"""Language models whose next token is known by construction, as ONNX forward graphs with real KV pools.

`scripted_lm` looks its logits up in a table. The row of the table is the last token, or, with `history=True`, a sum
over every earlier token read back from the KV pool, so that a single wrong, stale or misplaced KV row changes the
output. `reference_logits` is the same rule in NumPy.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32


def reference_logits(table: np.ndarray, tokens: list[int], history: bool = True) -> np.ndarray:
    """Logits [V] that follow `tokens`."""
    n_states = table.shape[0]
    earlier = sum((position % 7 + 1) * token for position, token in enumerate(tokens[:-1])) if history else 0
    return table[(tokens[-1] + earlier) % n_states]


def greedy_reference(
    table: np.ndarray, prompt: list[int], n_new: int, eos: tuple[int, ...] = (), history: bool = True
) -> list[int]:
    """Plain greedy decoding by the rule itself, without a graph."""
    tokens = list(prompt)
    for _ in range(n_new):
        tokens.append(int(reference_logits(table, tokens, history).argmax()))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


def scripted_lm(table: np.ndarray, history: bool = True, position_ids: bool = True) -> onnx.ModelProto:
    """A forward graph with one KV layer of one head of size 1 and vocabulary ``table.shape[1]``."""
    n_states, vocab = table.shape
    ints = {
        "n_states": np.array(n_states, np.int64),
        "seven": np.array(7, np.int64),
        "zero": np.array(0, np.int64),
        "one": np.array(1, np.int64),
        "zero_1": np.array([0], np.int64),
        "use_history": np.array(int(history), np.int64),
        "pool_shape": np.array([1, 1, -1, 1], np.int64),
        "flat": np.array([-1], np.int64),
    }
    weights = [numpy_helper.from_array(array, name) for name, array in ints.items()]
    weights.append(numpy_helper.from_array(table.astype(np.float32), "table"))
    n = helper.make_node
    nodes = [
        n("Cast", ["past_lengths"], ["past"], to=INT64),
        n("Squeeze", ["past"], ["past_scalar"]),
        n("Reshape", ["input_ids", "flat"], ["ids"]),
        n("Shape", ["ids"], ["n_new"]),
        n("Squeeze", ["n_new"], ["n_new_scalar"]),
        n("Add", ["past_scalar", "n_new_scalar"], ["total"]),
        n("Range", ["past_scalar", "total", "one"], ["positions"]),
        # write the tokens and their positions into the pool
        n("Reshape", ["positions", "pool_shape"], ["rows"]),
        n("Cast", ["ids"], ["ids_f"], to=FLOAT),
        n("Reshape", ["ids_f", "pool_shape"], ["new_k"]),
        n("ScatterElements", ["k_pool.0", "rows", "new_k"], ["k_pool_out.0"], axis=2),
        n("Cast", ["positions"], ["positions_f"], to=FLOAT),
        n("Reshape", ["positions_f", "pool_shape"], ["new_v"]),
        n("ScatterElements", ["v_pool.0", "rows", "new_v"], ["v_pool_out.0"], axis=2),
        # sum over the valid rows of the pool, then over the new rows before each new row
        n("Reshape", ["k_pool.0", "flat"], ["old_tokens_f"]),
        n("Cast", ["old_tokens_f"], ["old_tokens"], to=INT64),
        n("Reshape", ["v_pool.0", "flat"], ["old_positions_f"]),
        n("Cast", ["old_positions_f"], ["old_positions"], to=INT64),
        n("Slice", ["old_tokens", "zero_1", "past"], ["valid_tokens"]),
        n("Slice", ["old_positions", "zero_1", "past"], ["valid_positions"]),
        n("Mod", ["valid_positions", "seven"], ["old_mod"]),
        n("Add", ["old_mod", "one"], ["old_weight"]),
        n("Mul", ["valid_tokens", "old_weight"], ["old_terms"]),
        n("ReduceSum", ["old_terms"], ["old_sum"], keepdims=0),
        n("Mod", ["positions", "seven"], ["new_mod"]),
        n("Add", ["new_mod", "one"], ["new_weight"]),
        n("Mul", ["ids", "new_weight"], ["new_terms"]),
        n("CumSum", ["new_terms", "zero"], ["new_sums"], exclusive=1),
        n("Add", ["new_sums", "old_sum"], ["earlier"]),
        n("Mul", ["earlier", "use_history"], ["earlier_used"]),
        n("Add", ["ids", "earlier_used"], ["raw_state"]),
        n("Mod", ["raw_state", "n_states"], ["state"]),
        n("Gather", ["state", "logit_rows"], ["wanted"]),
        n("Gather", ["table", "wanted"], ["rows_of_table"]),
        n("Unsqueeze", ["rows_of_table", "zero_1"], ["logits"]),
    ]
    inputs = [helper.make_tensor_value_info("input_ids", INT64, ["batch", "seq"])]
    if position_ids:
        inputs.append(helper.make_tensor_value_info("position_ids", INT64, ["batch", "seq"]))
    inputs += [
        helper.make_tensor_value_info("logit_rows", INT64, ["rows"]),
        helper.make_tensor_value_info("past_lengths", INT32, ["batch"]),
        helper.make_tensor_value_info("k_pool.0", FLOAT, ["batch", 1, "max_rows", 1]),
        helper.make_tensor_value_info("v_pool.0", FLOAT, ["batch", 1, "max_rows", 1]),
    ]
    outputs = [
        helper.make_tensor_value_info("logits", FLOAT, ["batch", "rows", vocab]),
        helper.make_tensor_value_info("k_pool_out.0", FLOAT, ["batch", 1, "max_rows", 1]),
        helper.make_tensor_value_info("v_pool_out.0", FLOAT, ["batch", 1, "max_rows", 1]),
    ]
    graph = helper.make_graph(nodes, "scripted_lm", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    return model
