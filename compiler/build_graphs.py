"""From an exported model to the finished graphs of one member of the pair: passes, and one lowering a kernel set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsc.bundle_schema.errors import RequestError
from dsc.compiler.emit import GraphPart, ModelPart
from dsc.compiler.request import CompileRequest, Kernels, PassOptions, Precision, WeightOptions
from dsc.passes.pipeline import PipelineReport, load_pass, parse_pipeline, run_pipeline
from dsc.passes.pipelines import backend_pipeline, shared_pipeline

if TYPE_CHECKING:
    import onnx_ir as ir

    from dsc.compiler.exported import ExportedModel
    from dsc.passes.base import GraphPass
    from dsc.passes.pipeline import PassRun


@dataclass(frozen=True)
class BuiltModel:
    """The finished graphs of a model, and what the passes did to get there."""

    part: ModelPart
    reports: dict[str, PipelineReport]


def effective_precision(weights: WeightOptions, exported: ExportedModel) -> Precision:
    """What ``keep`` means for this model: its own blocks if it has some, float32 otherwise."""
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
    precision = effective_precision(weights, exported)
    options = request.passes
    shared = exported.model.clone()
    reports = {
        owner: run_pipeline(shared, _shared_passes(exported, weights, precision, options), _dumper(owner, options))
    }
    graphs = []
    for kernels in _kernel_sets(request.kernels):
        graph = shared.clone()
        name = f"{owner} {kernels}"
        passes = backend_pipeline("cpu", native=kernels is Kernels.NATIVE)
        reports[name] = run_pipeline(graph, passes, _dumper(name.replace(" ", "-"), options))
        role = "forward_native" if kernels is Kernels.NATIVE else "forward"
        file = "graph.native.onnx" if kernels is Kernels.NATIVE else "graph.onnx"
        graphs.append(GraphPart(f"{owner}/{file}", role, graph, str(precision)))
    info = exported.info.model_copy(update={"quantization": _described(precision, exported)})
    return BuiltModel(ModelPart(info, tuple(graphs)), reports)


def _described(precision: Precision, exported: ExportedModel) -> str:
    """The weights in words; carried blocks by their own names."""
    if precision is not Precision.KEEP:
        return str(precision)
    return "carried " + ", ".join(sorted({block.kind for block in exported.block_weights.values()}))


def _kernel_sets(kernels: Kernels) -> tuple[Kernels, ...]:
    """A bundle for native kernels also runs without them."""
    return (Kernels.ORT,) if kernels is Kernels.ORT else (Kernels.ORT, Kernels.NATIVE)


def _shared_passes(
    exported: ExportedModel, weights: WeightOptions, precision: Precision, options: PassOptions
) -> tuple[GraphPass, ...]:
    if options.pipeline is not None:
        return parse_pipeline(options.pipeline)
    return shared_pipeline(
        precision=str(precision),
        block=weights.block_size,
        head_precision=str(weights.head_precision) if weights.head_precision else None,
        exclude=weights.exclude,
        block_weights=exported.block_weights if precision is Precision.KEEP else {},
    )


def _dumper(stem: str, options: PassOptions) -> Callable[[GraphPass, ir.Model, PassRun], None] | None:
    """Writes the graph as text after the passes that were asked for."""
    if not options.dump_after:
        return None
    for name in options.dump_after:
        if name != "all":
            load_pass(name)
    folder = options.dump_dir or Path()
    if not folder.is_dir():
        raise RequestError("--dump-dir", f"a folder is required, got {folder}")
    count = 0

    def dump(graph_pass: GraphPass, model: ir.Model, run: PassRun) -> None:
        nonlocal count
        count += 1
        if "all" in options.dump_after or graph_pass.name in options.dump_after:
            path = folder / f"{stem}.{count:02d}.{graph_pass.name}.txt"
            path.write_text(f"{run.spec}\n{model.graph}\n", encoding="utf-8")

    return dump
