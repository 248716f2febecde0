"""Small decoders as other exporters write them: past keys and values in, present ones out; and their data files.

`buffer_decoder` has GroupQueryAttention over a shared buffer behind an attention mask, `concat_decoder` attention in
standard operators over concatenated keys. `greedy_by` runs such a graph alone, without a cache: the reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, INT32, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL
N_LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 16
HIDDEN, POSITIONS = HEADS * HEAD_DIM, 256
n = helper.make_node


def buffer_decoder(seed: int = 0, vocab: int = 64, window: int = -1) -> onnx.ModelProto:
    """Grouped-query attention with packed projections and rotary tables, appending to a buffer in place."""
    rng = np.random.default_rng(seed)
    angles = np.arange(POSITIONS)[:, None] * 1e4 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    weights = _weights(rng, vocab, width) | {"cos_cache": np.cos(angles), "sin_cache": np.sin(angles)}
    nodes = [
        n("Constant", [], ["one"], value=numpy_helper.from_array(np.array([1], np.int64))),
        n("ReduceSum", ["attention_mask", "one"], ["n_tokens"], keepdims=0),
        n("Sub", ["n_tokens", "one"], ["last_i64"]),
        n("Cast", ["last_i64"], ["last"], to=INT32),
        n("Shape", ["attention_mask"], ["mask_shape"]),
        n("Constant", [], ["at_1"], value=numpy_helper.from_array(np.array(1, np.int64))),
        n("Gather", ["mask_shape", "at_1"], ["total_i64"], axis=0),
        n("Cast", ["total_i64"], ["total"], to=INT32),
        n("Gather", ["embed.weight", "input_ids"], ["h.0"]),
        n("SimplifiedLayerNormalization", ["h.0", "norm.0"], ["x.0"], epsilon=1e-5, axis=-1, stash_type=1),
    ]
    for layer in range(N_LAYERS):
        attention = ["qkv", "", "", f"past_key_values.{layer}.key", f"past_key_values.{layer}.value", "last", "total"]
        attention[0] = f"qkv.{layer}"
        nodes += [
            n("MatMul", [f"x.{layer}", f"qkv.weight.{layer}"], [f"qkv.{layer}"]),
            n(
                "GroupQueryAttention",
                [*attention, "cos_cache", "sin_cache", "", "", ""],
                [f"a.{layer}", f"present.{layer}.key", f"present.{layer}.value"],
                domain="com.microsoft",
                num_heads=HEADS,
                kv_num_heads=KV_HEADS,
                do_rotary=1,
                local_window_size=window,
            ),
            n("MatMul", [f"a.{layer}", f"o.weight.{layer}"], [f"o.{layer}"]),
            n(
                "SkipSimplifiedLayerNormalization",
                [f"h.{layer}", f"o.{layer}", f"norm.{layer + 1}"],
                [f"x.{layer + 1}", "", "", f"h.{layer + 1}"],
                domain="com.microsoft",
                epsilon=1e-5,
            ),
        ]
    nodes.append(n("MatMul", [f"x.{N_LAYERS}", "head.weight"], ["logits"]))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return _model(nodes, weights, vocab, KV_HEADS, "kv_cache_dim", opsets, position_ids=False)


def concat_decoder(seed: int = 0, vocab: int = 64) -> onnx.ModelProto:
    """Attention written out over Concat(past, new), learned positions, a mask of attention_mask and position_ids."""
    rng = np.random.default_rng(seed)
    weights = _weights(rng, vocab, 3 * HIDDEN) | {"positions.weight": rng.normal(size=(POSITIONS, HIDDEN))}
    weights["scale"] = np.array(HEAD_DIM**-0.5)
    weights["lowest"] = np.array(-1e9)
    weights["zero_f"] = np.array(0.0)
    ints = {"heads": [0, 0, HEADS, HEAD_DIM], "flat": [0, 0, HIDDEN], "thirds": [HIDDEN] * 3}
    ints |= {"zero": 0, "one": 1, "axis_1": [1], "axis_last": [-1]}
    nodes = [
        n("Gather", ["embed.weight", "input_ids"], ["e"]),
        n("Gather", ["positions.weight", "position_ids"], ["p"]),
        n("Add", ["e", "p"], ["h.0"]),
        n("Shape", ["attention_mask"], ["total"], start=1, end=2),
        n("Squeeze", ["total"], ["total_scalar"]),
        n("Range", ["zero", "total_scalar", "one"], ["keys"]),
        n("Unsqueeze", ["position_ids", "axis_last"], ["queries"]),
        n("LessOrEqual", ["keys", "queries"], ["earlier"]),
        n("Unsqueeze", ["attention_mask", "axis_1"], ["mask_3"]),
        n("Cast", ["mask_3"], ["real"], to=BOOL),
        n("And", ["earlier", "real"], ["seen_3"]),
        n("Unsqueeze", ["seen_3", "axis_1"], ["seen"]),
        n("Where", ["seen", "zero_f", "lowest"], ["bias"]),
    ]
    for layer in range(N_LAYERS):
        nodes += _concat_layer(layer)
    nodes.append(n("MatMul", [f"h.{N_LAYERS}", "head.weight"], ["logits"]))
    model = _model(nodes, weights, vocab, HEADS, HEAD_DIM, [helper.make_opsetid("", 18)], position_ids=True)
    model.graph.initializer.extend(numpy_helper.from_array(np.array(v, np.int64), name) for name, v in ints.items())
    return model


def _concat_layer(i: int) -> list[onnx.NodeProto]:
    nodes = [
        n("MatMul", [f"h.{i}", f"qkv.weight.{i}"], [f"qkv.{i}"]),
        n("Split", [f"qkv.{i}", "thirds"], [f"q2.{i}", f"k2.{i}", f"v2.{i}"], axis=-1),
    ]
    for part in "qkv":
        nodes.append(n("Reshape", [f"{part}2.{i}", "heads"], [f"{part}3.{i}"]))
        nodes.append(n("Transpose", [f"{part}3.{i}"], [f"{part}.{i}"], perm=[0, 2, 1, 3]))
    return [
        *nodes,
        n("Concat", [f"past_key_values.{i}.key", f"k.{i}"], [f"present.{i}.key"], axis=2),
        n("Concat", [f"past_key_values.{i}.value", f"v.{i}"], [f"present.{i}.value"], axis=-2),
        n("Transpose", [f"present.{i}.key"], [f"kt.{i}"], perm=[0, 1, 3, 2]),
        n("MatMul", [f"q.{i}", f"kt.{i}"], [f"products.{i}"]),
        n("Mul", [f"products.{i}", "scale"], [f"scaled.{i}"]),
        n("Add", [f"scaled.{i}", "bias"], [f"scores.{i}"]),
        n("Softmax", [f"scores.{i}"], [f"w.{i}"], axis=-1),
        n("MatMul", [f"w.{i}", f"present.{i}.value"], [f"o4.{i}"]),
        n("Transpose", [f"o4.{i}"], [f"o3.{i}"], perm=[0, 2, 1, 3]),
        n("Reshape", [f"o3.{i}", "flat"], [f"o2.{i}"]),
        n("MatMul", [f"o2.{i}", f"o.weight.{i}"], [f"o.{i}"]),
        n("Add", [f"h.{i}", f"o.{i}"], [f"h.{i + 1}"]),
    ]


def _weights(rng: np.random.Generator, vocab: int, width: int) -> dict[str, np.ndarray]:
    weights = {"embed.weight": rng.normal(size=(vocab, HIDDEN)), "head.weight": rng.normal(size=(HIDDEN, vocab))}
    for layer in range(N_LAYERS):
        weights[f"qkv.weight.{layer}"] = rng.normal(size=(HIDDEN, width)) / np.sqrt(HIDDEN) * 1.5
        weights[f"o.weight.{layer}"] = rng.normal(size=(HIDDEN, HIDDEN)) / np.sqrt(HIDDEN)
    return weights | {f"norm.{layer}": rng.uniform(0.5, 1.5, HIDDEN) for layer in range(N_LAYERS + 1)}


def _model(nodes, weights, vocab, kv_heads, head_dim, opsets, position_ids) -> onnx.ModelProto:
    info = helper.make_tensor_value_info
    inputs = [info("input_ids", INT64, ["batch_size", "sequence_length"])]
    inputs.append(info("attention_mask", INT64, ["batch_size", "total_sequence_length"]))
    if position_ids:
        inputs.append(info("position_ids", INT64, ["batch_size", "sequence_length"]))
    outputs = [info("logits", FLOAT, ["batch_size", "sequence_length", vocab])]
    for layer in range(N_LAYERS):
        for role in ("key", "value"):
            past = ["batch_size", kv_heads, "past_sequence_length", head_dim]
            present = ["batch_size", kv_heads, "past_sequence_length + 1", head_dim]
            inputs.append(info(f"past_key_values.{layer}.{role}", FLOAT, past))
            outputs.append(info(f"present.{layer}.{role}", FLOAT, present))
    read = {name for node in nodes for name in node.input}
    tensors = [numpy_helper.from_array(a.astype(np.float32), name) for name, a in weights.items() if name in read]
    graph = helper.make_graph(nodes, "main_graph", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def dynamic_int8(model: onnx.ModelProto) -> None:
    """The head's activations in int8 with one scale for all rows, as dynamic quantisers write it."""
    head = model.graph.node.pop()
    hidden, name = head.input
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    weight.CopyFrom(numpy_helper.from_array(np.ones(tuple(weight.dims), np.int8), name))
    model.graph.node.extend([
        n("DynamicQuantizeLinear", [hidden], ["codes", "step", "offset"], name="to_int8"),
        n("MatMulInteger", ["codes", name, "offset"], ["whole"]),
        n("Cast", ["whole"], ["wide"], to=FLOAT),
        n("Mul", ["wide", "step"], list(head.output)),
    ])  # fmt: skip


def save_export(
    folder: Path,
    model: onnx.ModelProto,
    data_file: Callable[[int, str], str] = lambda index, name: "model.onnx.data",
    **config: object,
) -> Path:
    """Write model.onnx, its tensors into the files that `data_file(index, name)` names, and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, tensor in enumerate(stored_tensors(model)):
        array = numpy_helper.to_array(tensor)
        externalise(tensor, folder / data_file(index, tensor.name), array)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    if config:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder / "model.onnx"


def stored_tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """The float tensors of initializers and of node attributes."""
    attributes = [a.t for node in model.graph.node for a in node.attribute if a.type == onnx.AttributeProto.TENSOR]
    return [tensor for tensor in (*model.graph.initializer, *attributes) if tensor.data_type == FLOAT]


def externalise(tensor: onnx.TensorProto, file: Path, array: np.ndarray) -> None:
    """Append a tensor's bytes to `file` and let the tensor refer to it by name."""
    offset = file.stat().st_size if file.exists() else 0
    with file.open("ab") as stream:
        stream.write(array.tobytes())
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", file.name), ("offset", offset), ("length", array.nbytes)):
        tensor.external_data.add(key=key, value=str(value))


def plain_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """Logits [S, V] of the exported graph itself on `tokens`, nothing past."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    length = len(tokens)
    feeds: dict[str, np.ndarray] = {}
    for value in session.get_inputs():
        if value.name.startswith("past_key_values"):
            # A shared buffer has rows to spare, a concatenated past has none.
            rows = 0 if isinstance(value.shape[3], int) else length
            feeds[value.name] = np.zeros((1, value.shape[1], rows, HEAD_DIM), np.float32)
    names = {value.name for value in session.get_inputs()}
    feeds["input_ids"] = np.array([tokens], np.int64)
    feeds["attention_mask"] = np.ones((1, length), np.int64)
    if "position_ids" in names:
        feeds["position_ids"] = np.arange(length)[None]
    return session.run(["logits"], feeds)[0][0]


def greedy_by(path: Path, prompt: list[int], n_new: int) -> list[int]:
    """Greedy decoding that runs the exported graph on the whole sequence for every token."""
    tokens = list(prompt)
    for _ in range(n_new):
        tokens.append(int(plain_logits(path, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
