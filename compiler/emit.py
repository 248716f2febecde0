"""From finished graphs to a `.dsmodel` file: weights first, then the graphs that name their offsets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from dsc.bundle_schema.certificate import CERTIFICATE_NAME, Certificate, dump_certificate
from dsc.bundle_schema.container import STORED_LOCATION, BundleWriter
from dsc.bundle_schema.dflash_config import DFLASH_CONFIG_NAME, DflashConfig, dump_config
from dsc.bundle_schema.kv_plan import PLAN_NAMES, GraphBackend, KvPlan, dump_plan
from dsc.bundle_schema.manifest import (
    DraftEntry,
    DraftKind,
    GraphEntry,
    Manifest,
    ModelEntry,
    Requires,
    TokenizerEntry,
)
from dsc.bundle_schema.model_info import ModelInfo
from dsc.bundle_schema.tensors import DType, TensorSpec
from dsc.compiler.card import CARD_NAME, write_card
from dsc.compiler.gpu_kernels import GpuKernels
from dsc.compiler.tokenizer_compact import compact_files
from dsc.kernels.bundle_members import kernel_entry

if TYPE_CHECKING:
    from dsc.bundle_schema.manifest import KernelEntry
    from dsc.kernels.aot import CompiledKernel

INLINE_NBYTES = 1024
MIN_ONNXRUNTIME = "1.31.0"
_TOKENIZER_SHARE = 64
"""A file should add less than a fiftieth to its tensors: a tokenizer.json over this share of them is made smaller."""

_DTYPES = {
    ir.DataType.FLOAT: DType.FLOAT32,
    ir.DataType.FLOAT16: DType.FLOAT16,
    ir.DataType.BFLOAT16: DType.BFLOAT16,
    ir.DataType.INT8: DType.INT8,
    ir.DataType.UINT8: DType.UINT8,
    ir.DataType.INT16: DType.INT16,
    ir.DataType.INT32: DType.INT32,
    ir.DataType.INT64: DType.INT64,
    ir.DataType.BOOL: DType.BOOL,
}


@dataclass(frozen=True)
class GraphPart:
    """One finished graph and where it goes."""

    member: str
    role: str
    model: ir.Model
    precision: str
    backend: GraphBackend = "cpu"


@dataclass(frozen=True)
class ModelPart:
    """A model and its graphs."""

    info: ModelInfo
    graphs: tuple[GraphPart, ...]

    def info_on(self, backend: GraphBackend) -> ModelInfo:
        """`info` as the graphs for `backend` have it."""
        graph = next(graph for graph in self.graphs if graph.backend == backend)
        return self.info.on_backend(backend, pool_dtype(graph.model))


def pool_dtype(model: ir.Model) -> DType:
    """Element type of a graph's KV pools; half precision makes them half as large."""
    pool = next(value for value in model.graph.inputs if str(value.name).startswith("k_pool."))
    return DType.FLOAT16 if pool.dtype is not None and pool.dtype.name == "FLOAT16" else DType.FLOAT32


@dataclass(frozen=True)
class BundleContents:
    """All that goes into a bundle."""

    name: str
    target: ModelPart
    draft_kind: DraftKind
    draft: ModelPart | None
    tokenizer: dict[str, bytes]
    tokenizer_verdict: TokenizerEntry
    n_shared: int | None
    plans: dict[GraphBackend, KvPlan]
    config: DflashConfig
    certificate: Certificate
    recipe: dict[str, Any]
    sources: dict[str, str]
    licences: dict[str, str]
    created_by: dict[str, str]
    gpu: GpuKernels = field(default_factory=GpuKernels)


def emit_bundle(path: Path, contents: BundleContents) -> Manifest:
    """Write the bundle; equal tensors are stored once, whichever graphs use them.

    Raises:
        BundleError, HostError: it cannot be written; an older file at `path` stays as it was.
    """
    parts = [*contents.target.graphs, *(contents.draft.graphs if contents.draft else ())]
    with BundleWriter(path) as writer:
        entries: dict[str, GraphEntry] = {}
        serialised: dict[str, bytes] = {}
        for part in parts:
            entries[part.member] = _graph_entry(part)
            with _externalised(part, writer):
                serialised[part.member] = _serialise(part.model)
        for member, data in serialised.items():
            writer.add(member, data)
        kernels = tuple(_add_kernel(writer, kernel) for kernel in contents.gpu.kernels)
        tokenizer = compact_files(contents.tokenizer, writer.weights_nbytes // _TOKENIZER_SHARE)
        tokenizer_members = tuple(f"tokenizer/{name}" for name in sorted(tokenizer))
        for name in sorted(tokenizer):
            writer.add(f"tokenizer/{name}", tokenizer[name])
        for backend, plan in contents.plans.items():
            writer.add(PLAN_NAMES[backend], dump_plan(plan))
        writer.add(DFLASH_CONFIG_NAME, dump_config(contents.config))
        writer.add(CERTIFICATE_NAME, dump_certificate(contents.certificate))
        writer.add(CARD_NAME, write_card(contents, contents.certificate).encode())
        verdict = contents.tokenizer_verdict
        return writer.seal(
            Manifest(
                name=contents.name,
                created_by=contents.created_by,
                licences=contents.licences,
                sources=contents.sources,
                recipe=contents.recipe,
                requires=_requires(tuple(entries.values())),
                target=_model_entry(contents.target, entries),
                draft=DraftEntry(
                    kind=contents.draft_kind,
                    model=_model_entry(contents.draft, entries) if contents.draft else None,
                    n_shared=contents.n_shared,
                ),
                tokenizer=TokenizerEntry(members=tokenizer_members, verdict=verdict.verdict, summary=verdict.summary),
                kernels=kernels,
                kernels_left_out=contents.gpu.left_out,
            )
        )


def _serialise(model: ir.Model) -> bytes:
    """The graph without types of initializers, which state their own: a tenth of a graph of a small model."""
    proto = ir.to_proto(model)
    stated = {tensor.name for tensor in proto.graph.initializer}
    others = [info for info in proto.graph.value_info if info.name not in stated]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(others)
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


@contextmanager
def _externalised(part: GraphPart, writer: BundleWriter) -> Iterator[None]:
    """Write the large initializers of a graph; inside the block they name their place in the bundle."""
    kept: list[tuple[ir.Value, ir.TensorProtocol]] = []
    for name, value in part.model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.nbytes < INLINE_NBYTES:
            continue
        shape = tuple(tensor.shape.numpy())
        stored = writer.add_weight(_buffer(tensor), _DTYPES[tensor.dtype], shape, (part.member, name))
        kept.append((value, tensor))
        value.const_value = ir.ExternalTensor(
            STORED_LOCATION, stored.offset, stored.nbytes, tensor.dtype, shape=ir.Shape(shape), name=name
        )
    try:
        yield
    finally:
        for value, tensor in kept:
            value.const_value = tensor


def _buffer(tensor: ir.TensorProtocol) -> memoryview:
    """The tensor's little-endian bytes, copied only when they are not contiguous in memory."""
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data


def _add_kernel(writer: BundleWriter, kernel: CompiledKernel) -> KernelEntry:
    entry = kernel_entry(kernel)
    writer.add(entry.member, kernel.code)
    return entry


def _model_entry(part: ModelPart, entries: dict[str, GraphEntry]) -> ModelEntry:
    return ModelEntry(info=part.info, graphs=tuple(entries[graph.member] for graph in part.graphs))


def _graph_entry(part: GraphPart) -> GraphEntry:
    model = part.model
    operators = Counter(f"{node.domain or 'ai.onnx'}::{node.op_type}" for node in model.graph)
    return GraphEntry(
        member=part.member,
        backend=part.backend,
        role=part.role,
        ir_version=model.ir_version,
        opsets={domain or "ai.onnx": version for domain, version in sorted(model.opset_imports.items())},
        inputs=tuple(_spec(value) for value in model.graph.inputs),
        outputs=tuple(_spec(value) for value in model.graph.outputs),
        operators=dict(sorted(operators.items())),
        functions=tuple(sorted(f"{domain}::{name}" for domain, name, _ in model.functions)),
        n_parameters=sum(
            int(value.const_value.size) for value in model.graph.initializers.values() if value.const_value is not None
        ),
        precision=part.precision,
    )


def _spec(value: ir.Value) -> TensorSpec:
    axes = tuple(axis if isinstance(axis, int) else str(axis.value) for axis in value.shape or ())
    assert value.name is not None
    assert value.dtype is not None
    return TensorSpec(name=value.name, dtype=_DTYPES[value.dtype], axes=axes)


def _requires(entries: tuple[GraphEntry, ...]) -> Requires:
    opsets: dict[str, int] = {}
    for entry in entries:
        for domain, version in entry.opsets.items():
            opsets[domain] = max(version, opsets.get(domain, 0))
    return Requires(
        min_onnxruntime=MIN_ONNXRUNTIME,
        ir_version=max(entry.ir_version for entry in entries),
        opsets=dict(sorted(opsets.items())),
    )
