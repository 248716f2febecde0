"""From an exported model to the finished graphs of one member of the pair: passes, and one lowering a kernel set."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dsc.bundle_schema.dflash_config import MAX_WINDOW
from dsc.bundle_schema.errors import RequestError
from dsc.bundle_schema.tensors import DType
from dsc.compiler.emit import GraphPart, ModelPart, pool_dtype
from dsc.compiler.request import (
    Backend,
    CompileRequest,
    CudaAttention,
    Kernels,
    PassOptions,
    Precision,
    WeightOptions,
)
from dsc.compiler.request_checks import EVERY_PASS
from dsc.kernels.attention_table import HEAD_SIZES
from dsc.passes.matmul_weights import matmul_weights
from dsc.passes.pass_order import (
    NATIVE_BLOCK,
    carried_blocks,
    kernel_passes,
    layout_passes,
    shared_passes,
    why_not_cuda_native,
    why_not_native,
)
from dsc.passes.pass_order import Kernels as KernelSet
from dsc.passes.pipeline import PipelineReport, parse_pipeline, run_pipeline
from dsc.passes.quantize_weights import head_weight
from dsc.passes.ring_pools import ring_layers

if TYPE_CHECKING:
    import onnx_ir as ir

    from dsc.bundle_schema.kv_plan import GraphBackend
    from dsc.bundle_schema.model_info import ModelInfo
    from dsc.compiler.exported import ExportedModel
    from dsc.passes.base import GraphPass
    from dsc.passes.block_quantisation import BlockWeights
    from dsc.passes.pipeline import PassRun


_BY_PASSES = "by the given passes"


@dataclass(frozen=True)
class BuiltModel:
    """The finished graphs of a model, what the passes did to get there, and what a person should know of it.

    Attributes:
        left_out: what of the GPU's the request asked for and the model cannot have -> the reason; for the manifest.
    """

    part: ModelPart
    reports: dict[str, PipelineReport]
    notes: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)


def effective_precision(weights: WeightOptions, exported: ExportedModel, passes: PassOptions) -> Precision:
    """What ``keep`` means for this model: its own blocks if it has some, float32 otherwise.

    Passes that the user gives say themselves what becomes of the weights: all they start from is float32.
    """
    if passes.pipeline is not None and weights.precision is not Precision.FP16:
        return Precision.FP32
    if weights.precision is not Precision.KEEP:
        return weights.precision
    return Precision.KEEP if exported.block_weights else Precision.FP32


def build_graphs(owner: str, exported: ExportedModel, weights: WeightOptions, request: CompileRequest) -> BuiltModel:
    """Run the passes on a copy of the exported graph; tensors are shared with it, not copied.

    Args:
        owner: ``target`` or ``draft``: the folder of the graphs in the bundle.

    Raises:
        PassError: a pass failed; it is named with those before it.
        RequestError: a pass, an option or a name to dump is unknown.
    """
    precision = effective_precision(weights, exported, request.passes)
    _require_float32(owner, exported, precision)
    carried = _carried(exported, weights, precision)
    notes = _notes_on_blocks(owner, exported, precision, carried)
    notes += _notes_on_unused(owner, exported, weights, precision, request.passes, carried)
    shared = exported.model.clone()
    layout = layout_passes(_kernel_sets(request), _name(precision))
    passes = (*_shared_passes(weights, precision, carried, request.passes), *layout)
    reports = {owner: run_pipeline(shared, passes, _dumper(owner, request.passes))}
    positions = min(request.max_length or exported.info.max_length, exported.info.max_length) + MAX_WINDOW + 1
    graphs = []
    left_out: dict[str, str] = {}
    quantised = _quantises(request.passes)
    for kernels in _kernel_sets(request):
        if why := _why_not(kernels, shared, precision, exported.info):
            if kernels == "native":
                notes.append(f"{owner}: no graph for the native kernels: {why}")
            else:
                left_out[f"graph of the {owner} for the bundle's own attention kernels"] = why
            continue
        graph = shared.clone()
        name = f"{owner} {kernels}"
        passes = kernel_passes(kernels, _name(precision), positions)
        reports[name] = run_pipeline(graph, passes, _dumper(name.replace(" ", "-"), request.passes))
        graphs.append(_graph_part(owner, kernels, graph, _BY_PASSES if quantised else str(precision)))
    notes += _notes_on_dumps(owner, reports, request.passes)
    quantization = _described(precision, exported, request.passes)
    rings = frozenset().union(*(ring_layers(graph.model) for graph in graphs))
    info = exported.info.model_copy(update={"quantization": quantization})
    info = info.with_pools(pool_dtype(graphs[0].model), rings)
    return BuiltModel(ModelPart(info, tuple(graphs)), reports, tuple(notes), left_out)


def _require_float32(owner: str, exported: ExportedModel, precision: Precision) -> None:
    """Refuse to quantise an adopted graph that computes in half precision."""
    if precision in (Precision.INT8, Precision.INT4) and pool_dtype(exported.model) is DType.FLOAT16:
        raise RequestError(
            f"{owner} precision",
            f"a graph that computes in float32 is required for {precision}, this one was adopted in float16",
            "take it as it is with `keep`, or export it in float32",
        )


def _carried(exported: ExportedModel, weights: WeightOptions, precision: Precision) -> dict[str, BlockWeights]:
    """The checkpoint's own blocks that the asked precision leaves as they are."""
    head = str(weights.head_precision) if weights.head_precision else None
    return carried_blocks(exported.model, _name(precision), exported.block_weights, head)


def _notes_on_blocks(
    owner: str, exported: ExportedModel, precision: Precision, carried: dict[str, BlockWeights]
) -> list[str]:
    """What a precision other than ``keep`` did not do, because the checkpoint has that width already."""
    if precision is Precision.KEEP or not carried:
        return []
    kinds = ", ".join(sorted({exported.block_weights[name].kind for name in carried}))
    return [f"{owner}: {len(carried)} matrices are {kinds} in the checkpoint and were carried, not rounded again"]


def _notes_on_unused(
    owner: str,
    exported: ExportedModel,
    weights: WeightOptions,
    precision: Precision,
    passes: PassOptions,
    carried: dict[str, BlockWeights],
) -> list[str]:
    """Options about weights that change nothing, with the reason."""
    unused = weights.of_blocks()
    if passes.pipeline is not None:
        unused += ["precision"] if weights.precision in (Precision.INT8, Precision.INT4) else []
        why = "the passes that were given say what becomes of the weights"
    elif precision in (Precision.FP32, Precision.FP16):
        why = f"the weights stay {precision}"
    else:
        return [f"{owner}: {note}" for note in _unused_of_blocks(exported.model, weights, precision, carried)]
    return [f"{owner}: {option} changes nothing: {why}" for option in unused]


def _unused_of_blocks(
    model: ir.Model, weights: WeightOptions, precision: Precision, carried: dict[str, BlockWeights]
) -> list[str]:
    """The same where weights become blocks, or are some already."""
    names = {weight.name for weight in matmul_weights(model.graph)}
    unmet = [pattern for pattern in weights.exclude if not any(re.search(pattern, name) for name in names)]
    found = [f"exclude {pattern!r} changes nothing: no matrix has such a name" for pattern in unmet]
    if weights.block_size != NATIVE_BLOCK and names and names <= carried.keys():
        found.append("block_size changes nothing: every matrix is carried as it is in the checkpoint")
    head_carried = precision is Precision.KEEP and head_weight(model.graph) in carried
    if weights.head_precision in ("int4", "int8") and head_carried:
        found.append("head_precision changes nothing: the head is carried as it is in the checkpoint")
    elif weights.head_precision == "int4" and precision is not Precision.INT4:
        found.append(f"head_precision changes nothing: with {precision} the head has 8 bits")
    return found


def _notes_on_dumps(owner: str, reports: dict[str, PipelineReport], passes: PassOptions) -> list[str]:
    """Dumps that were asked for after passes that did not run."""
    ran = {run.spec.partition("{")[0] for report in reports.values() for run in report.runs}
    missing = [name for name in passes.dump_after if name not in (EVERY_PASS, *ran)]
    return [f"{owner}: no graph after {name}: the pass did not run" for name in missing]


def _quantises(passes: PassOptions) -> bool:
    """Whether the passes that the user gives turn weights into blocks."""
    return any(item.name.startswith("quantize-") for item in parse_pipeline(passes.pipeline or ""))


def _described(precision: Precision, exported: ExportedModel, passes: PassOptions) -> str:
    """The weights in words; carried blocks by their own names."""
    if _quantises(passes):
        return _BY_PASSES
    if precision is Precision.FP32 and exported.info.quantization != "none":
        return exported.info.quantization  # an adopted graph keeps the form it came in
    if precision is not Precision.KEEP:
        return str(precision)
    return "carried " + ", ".join(sorted({block.kind for block in exported.block_weights.values()}))


def _kernel_sets(request: CompileRequest) -> tuple[KernelSet, ...]:
    """A bundle for native kernels also runs without them."""
    sets: list[KernelSet] = ["ort"] if request.kernels is Kernels.ORT else ["ort", "native"]
    if Backend.CUDA in request.backends:
        sets.append("cuda")
        if request.cuda_attention is CudaAttention.DSPARK:
            sets.append("cuda_native")
    return tuple(sets)


def _why_not(kernels: KernelSet, shared: ir.Model, precision: Precision, info: ModelInfo) -> str:
    """Why there is no graph for a set of kernels; empty when there is one."""
    if kernels == "native":
        return why_not_native(shared, _name(precision))
    if kernels == "cuda_native":
        without = sorted({layer.head_dim for layer in info.kv_layers} - set(HEAD_SIZES))
        return f"head size {without[0]} has none" if without else why_not_cuda_native(shared)
    return ""


def _graph_part(owner: str, kernels: KernelSet, graph: ir.Model, weights: str) -> GraphPart:
    backend: GraphBackend = "cuda" if kernels.startswith("cuda") else "cpu"
    ours = kernels.endswith("native")
    file = ".".join(["graph", *(["cuda"] if backend == "cuda" else []), *(["native"] if ours else []), "onnx"])
    if backend == "cuda" and weights == Precision.FP32:
        weights = str(Precision.FP16)
    return GraphPart(f"{owner}/{file}", "forward_native" if ours else "forward", graph, weights, backend)


def _shared_passes(
    weights: WeightOptions, precision: Precision, carried: dict[str, BlockWeights], options: PassOptions
) -> tuple[GraphPass, ...]:
    if options.pipeline is not None:
        return parse_pipeline(options.pipeline)
    return shared_passes(
        _name(precision),
        block_weights=carried,
        head_precision=str(weights.head_precision) if weights.head_precision else None,
        exclude=weights.exclude,
        block=weights.block_size,
    )


def _name(precision: Precision) -> Literal["keep", "fp32", "fp16", "int8", "int4"]:
    return precision.value


def _dumper(stem: str, options: PassOptions) -> Callable[[GraphPass, ir.Model, PassRun], None] | None:
    """Writes the graph as text after the passes that were asked for."""
    if not options.dump_after:
        return None
    folder = options.dump_dir or Path()
    count = 0

    def dump(graph_pass: GraphPass, model: ir.Model, run: PassRun) -> None:
        nonlocal count
        count += 1
        if EVERY_PASS in options.dump_after or graph_pass.name in options.dump_after:
            path = folder / f"{stem}.{count:02d}.{graph_pass.name}.txt"
            try:
                path.write_text(f"{run.spec}\n{model.graph}\n", encoding="utf-8")
            except OSError as error:
                raise RequestError(str(path), f"the graph cannot be written: {error.strerror}") from error

    return dump
