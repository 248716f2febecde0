"""Which inputs and outputs of an adopted graph are the cache, the mask and the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsc.bundle_schema.errors import ModelError

if TYPE_CHECKING:
    import onnx_ir as ir

POOL_PLAIN = frozenset({"input_ids", "position_ids", "logit_rows", "past_lengths"})
PAST_PLAIN = frozenset({"input_ids", "position_ids", "attention_mask"})


@dataclass(frozen=True)
class CacheNames:
    """Names of one layer's cache with ``%d`` for the layer."""

    past_key: str
    past_value: str
    present_key: str
    present_value: str


POOL_NAMES = CacheNames("k_pool.%d", "v_pool.%d", "k_pool_out.%d", "v_pool_out.%d")
PAST_NAMES = CacheNames("past_key_values.%d.key", "past_key_values.%d.value", "present.%d.key", "present.%d.value")


@dataclass(frozen=True)
class CacheLayer:
    """The cache of one layer: graph inputs before the call, graph outputs after it."""

    past_key: ir.Value
    past_value: ir.Value
    present_key: ir.Value
    present_value: ir.Value


@dataclass(frozen=True)
class GraphPorts:
    """What a decoder graph calls its inputs and outputs.

    Attributes:
        pools: the graph has the project's own convention; otherwise it takes what is past and returns what is present.
        layers: its caches in layer order.
        ignored: outputs that nobody will read.
    """

    pools: bool
    layers: tuple[CacheLayer, ...]
    ignored: tuple[str, ...]


def cache_names(genai: Mapping[str, Any]) -> CacheNames:
    """The names that a genai_config.json states, the usual ones where it states none."""
    decoder = genai.get("model", {}).get("decoder", {})
    inputs, outputs = decoder.get("inputs", {}), decoder.get("outputs", {})
    return CacheNames(
        str(inputs.get("past_key_names", PAST_NAMES.past_key)),
        str(inputs.get("past_value_names", PAST_NAMES.past_value)),
        str(outputs.get("present_key_names", PAST_NAMES.present_key)),
        str(outputs.get("present_value_names", PAST_NAMES.present_value)),
    )


def find_ports(graph: ir.Graph, names: CacheNames, where: str) -> GraphPorts:
    """Recognise the graph's inputs and outputs.

    Args:
        names: of caches, for a graph that has not the project's own convention.

    Raises:
        ModelError: an input is unknown, or one that must be there is missing or has another type; it is named.
    """
    inputs = {str(value.name): value for value in graph.inputs}
    outputs = {str(value.name): value for value in graph.outputs}
    pools = POOL_NAMES.past_key % 0 in inputs
    layers = _layers(inputs, outputs, POOL_NAMES if pools else names, where)
    used = {id(value) for layer in layers for value in vars(layer).values()}
    plain = POOL_PLAIN if pools else PAST_PLAIN
    required = ("input_ids", "logit_rows", "past_lengths") if pools else ("input_ids",)
    for name in required:
        if name not in inputs:
            raise ModelError(where, f"an input {name!r} is required, got {', '.join(inputs)}")
    for name, value in inputs.items():
        if id(value) not in used and name not in plain:
            raise ModelError(
                f"{where}: input {name!r}",
                f"a decoder's inputs are {', '.join(sorted(plain))} and its caches, this is none of them",
                "export a decoder with a key-value cache and without other inputs",
            )
        if name in plain:
            _check_plain(name, value, where)
    _check_logits(outputs.get("logits"), outputs, where)
    ignored = tuple(name for name, value in outputs.items() if id(value) not in used and name != "logits")
    return GraphPorts(pools, layers, ignored)


def _layers(
    inputs: Mapping[str, ir.Value], outputs: Mapping[str, ir.Value], names: CacheNames, where: str
) -> tuple[CacheLayer, ...]:
    layers: list[CacheLayer] = []
    while _named(names.past_key, len(layers)) in inputs:
        before, after = (names.past_key, names.past_value), (names.present_key, names.present_value)
        wanted = [(inputs, _named(pattern, len(layers))) for pattern in before]
        wanted += [(outputs, _named(pattern, len(layers))) for pattern in after]
        for table, name in wanted:
            if name not in table:
                raise ModelError(where, f"input or output {name!r} is required beside the other caches")
            _check_cache(name, table[name], where)
        layers.append(CacheLayer(*(table[name] for table, name in wanted)))
    if not layers:
        raise ModelError(
            where,
            f"a key-value cache is required, inputs {_named(names.past_key, 0)!r} or {_named(POOL_NAMES.past_key, 0)!r}"
            f" and on, got {', '.join(inputs)}",
            "export with past key values",
        )
    return tuple(layers)


def _named(pattern: str, layer: int) -> str:
    return pattern.replace("%d", str(layer))


def _check_cache(name: str, value: ir.Value, where: str) -> None:
    import onnx_ir as ir

    floats = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    rank = None if value.shape is None else len(value.shape)
    if value.dtype not in floats or rank != 4:
        raise ModelError(
            f"{where}: {name!r}",
            f"a float32 or float16 cache [batch, heads, rows, head size] is required, got {value.dtype} {value.shape}",
        )


def _check_plain(name: str, value: ir.Value, where: str) -> None:
    """Ids, positions and rows as the runtime feeds them."""
    import onnx_ir as ir

    wanted = ir.DataType.INT32 if name == "past_lengths" else ir.DataType.INT64
    n_axes = 1 if name in ("past_lengths", "logit_rows") else 2
    rank = None if value.shape is None else len(value.shape)
    if value.dtype != wanted or rank != n_axes:
        raise ModelError(
            f"{where}: input {name!r}",
            f"{wanted.name} with {n_axes} axes is required, got {value.dtype} {value.shape}",
        )


def _check_logits(logits: ir.Value | None, outputs: Mapping[str, ir.Value], where: str) -> None:
    import onnx_ir as ir

    if logits is None:
        raise ModelError(where, f"an output 'logits' is required, got {', '.join(outputs)}")
    floats = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    if logits.dtype not in floats or logits.shape is None or len(logits.shape) != 3:
        raise ModelError(
            f"{where}: output 'logits'",
            f"float32 or float16 [batch, positions, vocabulary] is required, got {logits.dtype} {logits.shape}",
        )
