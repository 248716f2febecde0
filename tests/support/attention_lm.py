"""A one-layer attention model with random weights over GroupQueryAttention, full or windowed, as a forward graph."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
N_HEADS, N_KV_HEADS, HEAD_DIM = 4, 2, 16
HIDDEN = N_HEADS * HEAD_DIM


def attention_lm(seed: int, vocab: int, window: int = -1) -> onnx.ModelProto:
    """Embedding, grouped-query attention with rotary positions, head; `window` keys at most, -1 all."""
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return rng.normal(scale=1.5 / np.sqrt(shape[0]), size=shape).astype(np.float32)

    angles = np.arange(4096)[:, None] * 1e4 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    arrays = {
        "embedding": weight(vocab, HIDDEN) * np.float32(np.sqrt(vocab)),
        "w_q": weight(HIDDEN, HIDDEN),
        "w_k": weight(HIDDEN, N_KV_HEADS * HEAD_DIM),
        "w_v": weight(HIDDEN, N_KV_HEADS * HEAD_DIM),
        "head": weight(HIDDEN, vocab) * 3,
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "one": np.array(1, np.int32),
    }
    n = helper.make_node
    attributes = {"num_heads": N_HEADS, "kv_num_heads": N_KV_HEADS, "do_rotary": 1, "local_window_size": window}
    nodes = [
        n("Gather", ["embedding", "input_ids"], ["x"]),
        n("MatMul", ["x", "w_q"], ["q"]),
        n("MatMul", ["x", "w_k"], ["k"]),
        n("MatMul", ["x", "w_v"], ["v"]),
        n("Shape", ["input_ids"], ["n_new_64"], start=1),
        n("Cast", ["n_new_64"], ["n_new"], to=INT32),
        n("Add", ["past_lengths", "n_new"], ["total"]),
        n("Sub", ["total", "one"], ["last"]),
        n("Squeeze", ["total"], ["total_scalar"]),
        helper.make_node(
            "GroupQueryAttention",
            ["q", "k", "v", "k_pool.0", "v_pool.0", "last", "total_scalar", "cos", "sin"],
            ["o", "k_pool_out.0", "v_pool_out.0"],
            domain="com.microsoft",
            **attributes,
        ),
        n("Add", ["x", "o"], ["h"]),
        n("Gather", ["h", "logit_rows"], ["wanted"], axis=1),
        n("MatMul", ["wanted", "head"], ["logits"]),
    ]
    pool = ["batch", N_KV_HEADS, "max_rows", HEAD_DIM]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "attention_lm",
        [
            info("input_ids", INT64, ["batch", "seq"]),
            info("logit_rows", INT64, ["rows"]),
            info("past_lengths", INT32, ["batch"]),
            info("k_pool.0", FLOAT, pool),
            info("v_pool.0", FLOAT, pool),
        ],
        [
            info("logits", FLOAT, ["batch", "rows", vocab]),
            info("k_pool_out.0", FLOAT, pool),
            info("v_pool_out.0", FLOAT, pool),
        ],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
