"""What the rest of the compiler must know of an adopted graph: from the files beside it, and from the graph itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from dsc.bundle_schema.errors import ModelError
from dsc.bundle_schema.model_info import KvLayer, ModelInfo
from dsc.compiler import hf_files
from dsc.compiler.onnx_ports import GraphPorts
from dsc.passes.graph_edit import MICROSOFT, attribute, input_at, is_op, is_weight, static_dims

if TYPE_CHECKING:
    import onnx_ir as ir

_PACKED_OPERATORS = {"MatMulNBits": 5, "BlockMatMul": 4, "InterleavedMatMul": 4, "InterleavedMatMulSkipNorm": 4}
"""Products whose matrix is blocks -> the input after it."""
_FLOATS = ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE")


@dataclass(frozen=True)
class StatedFacts:
    """What the user says of a model whose files do not; None: not said."""

    max_length: int | None = None
    eos_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ModelFiles:
    """The files beside a graph.

    Attributes:
        config: config.json, the text part of it; empty without the file.
        genai: genai_config.json.
        generation: generation_config.json.
        tokenizer: file name -> content.
        licence: of the weights, where stated.
    """

    config: Mapping[str, Any]
    genai: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokenizer: dict[str, bytes]
    licence: str | None

    def first(self, *keys: str) -> Any:
        """The first of these configuration entries that is set; genai_config.json has its own names for some."""
        genai_model = self.genai.get("model", {})
        for table in (self.generation, self.config, genai_model, genai_model.get("decoder", {})):
            for key in keys:
                if table.get(key) is not None:
                    return table[key]
        return None


def read_files(folder: Path) -> ModelFiles:
    """Read what lies beside a graph in `folder`, or above it when the folder is a repository's ``onnx``.

    Raises:
        ModelError: a configuration is no JSON object.
    """
    places = [folder, folder.parent] if folder.name == "onnx" else [folder]
    config = _json(places, "config.json")
    return ModelFiles(
        config=config.get("text_config", config),
        genai=_json(places, "genai_config.json"),
        generation=_json(places, "generation_config.json"),
        tokenizer=next(
            (files for place in places if "tokenizer.json" in (files := hf_files.tokenizer_files(place))), {}
        ),
        licence=next((licence for place in places if (licence := hf_files.licence_of(place))), None),
    )


def _json(places: list[Path], name: str) -> dict[str, Any]:
    path = next((place / name for place in places if (place / name).is_file()), None)
    if path is None:
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(str(path), f"the configuration cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(str(path), f"a JSON object is required, got {type(data).__name__}")
    return data


def cache_heads(ports: GraphPorts, files: ModelFiles, where: str) -> tuple[tuple[int, int], ...]:
    """Key-value heads and head size of each layer: from the graph, or where it leaves them open from the files.

    Raises:
        ModelError: neither says, or they disagree.
    """
    n_heads = files.first("num_attention_heads")
    hidden = files.first("hidden_size")
    head_dim = files.first("head_dim", "head_size") or (hidden // n_heads if hidden and n_heads else None)
    stated = (files.first("num_key_value_heads") or n_heads, head_dim)
    found = []
    for layer in ports.layers:
        assert layer.past_key.shape is not None
        axes = [dim if isinstance(dim, int) else None for dim in layer.past_key.shape]
        heads, size = axes[1] or stated[0], axes[3] or stated[1]
        if not isinstance(heads, int) or not isinstance(size, int):
            raise ModelError(
                f"{where}: input {layer.past_key.name!r}",
                f"fixed heads and head size are required, got {layer.past_key.shape}",
                "put the model's config.json beside it",
            )
        found.append((heads, size))
    return tuple(found)


def adopted_info(
    model: ir.Model,
    ports: GraphPorts,
    heads: tuple[tuple[int, int], ...],
    files: ModelFiles,
    stated: StatedFacts,
    where: str,
) -> ModelInfo:
    """The facts about an adopted model.

    Raises:
        ModelError: something is stated nowhere and cannot be seen in the graph; it is named.
    """
    graph = model.graph
    vocab_size = _vocabulary(graph, files, where)
    layers = zip(heads, ports.layers, strict=True)
    kv_layers = tuple(
        KvLayer(n_kv_heads=n, head_dim=size, window=_window(layer.past_key)) for (n, size), layer in layers
    )
    try:
        return ModelInfo(
            architecture=str((files.first("architectures") or ["OnnxDecoder"])[0]),
            model_type=str(files.first("model_type", "type") or "onnx"),
            vocab_size=vocab_size,
            hidden_size=_known(files.first("hidden_size") or _hidden_size(graph), "hidden_size", where),
            n_layers=files.first("num_hidden_layers") or len(ports.layers),
            n_heads=_known(files.first("num_attention_heads") or _n_heads(graph), "num_attention_heads", where),
            max_length=_max_length(graph, files, stated, where),
            n_parameters=_n_parameters(graph),
            kv_layers=kv_layers,
            bos_id=next(iter(_ids(files.first("bos_token_id"))), None),
            eos_ids=_end_tokens(files, stated, where),
            pad_id=next(iter(_ids(files.first("pad_token_id"))), None),
            quantization=_stored_as(graph),
            licence=files.licence,
        )
    except (ValidationError, TypeError, ValueError) as error:
        raise ModelError(where, f"the configuration beside it is not usable: {str(error).splitlines()[0]}") from error


def rotary_rows(graph: ir.Graph) -> int | None:
    """Positions that the graph's rotary tables hold, None when it computes its angles."""
    tables = [input_at(node, 7) for node in graph.all_nodes() if is_op(node, "GroupQueryAttention", MICROSOFT)]
    tables += [input_at(node, 2) for node in graph.all_nodes() if is_op(node, "RotaryEmbedding", MICROSOFT)]
    rows = [dims[0] for table in tables if table is not None and (dims := static_dims(table)) and dims[0]]
    return min(rows, default=None)


def _known(value: Any, name: str, where: str) -> int:
    if value is None:
        raise ModelError(where, f"{name} must be known and is not seen in the graph", "put a config.json beside it")
    return int(value)


def _vocabulary(graph: ir.Graph, files: ModelFiles, where: str) -> int:
    """Width of the logits; no token id may be past the embedding's end."""
    logits = next(value for value in graph.outputs if value.name == "logits")
    dims = static_dims(logits)
    width = _known((dims[2] if dims else None) or files.first("vocab_size"), "vocab_size", where)
    embedding = _embedding(graph)
    if embedding is not None and embedding[0] < width:
        raise ModelError(where, f"an embedding for each of the {width} logits is required, there are {embedding[0]}")
    return width


def _embedding(graph: ir.Graph) -> tuple[int, int] | None:
    """Rows and columns of the table that token ids select from, None when no plain one is found."""
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    for node, index in ids.uses():
        table = input_at(node, 0)
        if is_op(node, "Gather") and index == 1 and attribute(node, "axis", 0) == 0 and is_weight(table):
            dims = static_dims(table) if table is not None else None
            if dims is not None and len(dims) == 2 and dims[0] and dims[1]:
                return dims[0], dims[1]
    return None


def _hidden_size(graph: ir.Graph) -> int | None:
    embedding = _embedding(graph)
    return embedding[1] if embedding else None


def _n_heads(graph: ir.Graph) -> int | None:
    """Query heads as attention operators state or show them."""
    for node in graph.all_nodes():
        if "num_heads" in node.attributes and "Attention" in node.op_type:
            return int(node.attributes["num_heads"].value)
        query = input_at(node, 0)
        dims = static_dims(query) if node.op_type == "VerifyAttention" and query is not None else None
        if dims is not None and len(dims) == 4 and dims[1]:
            return dims[1]
    return None


def _window(past_key: ir.Value) -> int | None:
    """The sliding window of the operator that reads a cache, where it has one."""
    node = next((node for node, _ in past_key.uses()), None)
    names = ("local_window_size", "window")
    sizes = [attribute(node, name, -1) for name in names] if node is not None and "Attention" in node.op_type else []
    return next((size for size in sizes if size > 0), None)


def _max_length(graph: ir.Graph, files: ModelFiles, stated: StatedFacts, where: str) -> int:
    """Positions that the model may use; a rotary table is a limit that nobody can lift."""
    declared = files.first("max_position_embeddings", "context_length", "n_positions") or stated.max_length
    table = rotary_rows(graph)
    if declared is None and table is None:
        raise ModelError(
            where,
            "the maximum length must be stated: no config.json or genai_config.json beside it says one",
            "give --max-length, or draft.max_length for a draft",
        )
    return min(int(length) for length in (declared, table) if length is not None)


def _end_tokens(files: ModelFiles, stated: StatedFacts, where: str) -> tuple[int, ...]:
    if stated.eos_ids is not None:
        return stated.eos_ids
    found = files.first("eos_token_id")
    if found is None:
        raise ModelError(
            where,
            "the tokens that end a text must be stated: no configuration beside it says them",
            "give --eos-id, once for each",
        )
    return _ids(found)


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(int(item) for item in values if item is not None and int(item) >= 0)


def _n_parameters(graph: ir.Graph) -> int:
    """Weights; those that are packed several to a byte are counted by the product's own width and depth."""
    packed = [node for node in graph.all_nodes() if node.op_type in _PACKED_OPERATORS]
    matrices = [value for node in packed for value in node.inputs[1 : _PACKED_OPERATORS[node.op_type]]]
    inside = {id(value) for value in matrices if value is not None}
    floats = [
        int(value.const_value.size)
        for value in graph.initializers.values()
        if value.const_value is not None and value.const_value.dtype.name in _FLOATS and id(value) not in inside
    ]
    return sum(floats) + sum(prod(attribute(node, name, 1) for name in "KN") for node in packed)


def _stored_as(graph: ir.Graph) -> str:
    """How the weights are stored, in words; ``none`` when all are float32."""
    bits = sorted({attribute(node, "bits", 4) for node in graph.all_nodes() if node.op_type in _PACKED_OPERATORS})
    words = [f"blocks of {width}-bit integers" for width in bits]
    kinds = {value.dtype.name for value in graph.initializers.values() if value.dtype is not None}
    words += [kind.lower() for kind in ("FLOAT16", "BFLOAT16") if kind in kinds]
    return f"adopted: {', '.join(words)}" if words else "none"
