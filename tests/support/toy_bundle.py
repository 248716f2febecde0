"""Whole `.dsmodel` files around hand-made graphs, so that every token and every acceptance is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from scripted_lm import scripted_lm

from dsc.bundle_schema.certificate import CERTIFICATE_NAME, Certificate, dump_certificate
from dsc.bundle_schema.container import STORED_LOCATION, BundleWriter
from dsc.bundle_schema.dflash_config import DFLASH_CONFIG_NAME, DflashConfig, Proposer, dump_config
from dsc.bundle_schema.kv_plan import PLAN_NAMES, GraphBackend, KvPlan, dump_plan
from dsc.bundle_schema.manifest import DraftEntry, GraphEntry, Manifest, ModelEntry, Requires, TokenizerEntry
from dsc.bundle_schema.model_info import KvLayer, ModelInfo
from dsc.bundle_schema.tensors import DType, TensorSpec
from dsc.compiler.plan_kv import plan_kv
from dsc.kernels.aot import CompiledKernel
from dsc.kernels.bundle_members import kernel_entry

_DTYPES = {
    1: DType.FLOAT32,
    2: DType.UINT8,
    16: DType.BFLOAT16,
    6: DType.INT32,
    7: DType.INT64,
    9: DType.BOOL,
    10: DType.FLOAT16,
}


def toy_info(
    vocab: int = 50,
    max_length: int = 64,
    eos_ids: tuple[int, ...] = (),
    kv_layers: tuple[KvLayer, ...] = (KvLayer(n_kv_heads=1, head_dim=1),),
) -> ModelInfo:
    return ModelInfo(
        architecture="ScriptedLM",
        model_type="scripted",
        vocab_size=vocab,
        hidden_size=1,
        n_layers=len(kv_layers),
        n_heads=1,
        max_length=max_length,
        n_parameters=vocab * vocab,
        kv_layers=kv_layers,
        eos_ids=eos_ids,
    )


def toy_plan(max_length: int, draft_layers: int = 0, window: int | None = None) -> KvPlan:
    """A plan of one target layer and perhaps draft layers; with `window` the target's rows may be a ring."""
    layer = KvLayer(n_kv_heads=1, head_dim=1, window=window, ring=window is not None)
    draft = toy_info(max_length=max_length, kv_layers=(KvLayer(n_kv_heads=1, head_dim=1),) * max(draft_layers, 1))
    return plan_kv(
        toy_info(max_length=max_length, kv_layers=(layer,)),
        draft if draft_layers else None,
        max_length=max_length,
        rollback_slack=9,
    )


def externalise(model: onnx.ModelProto, writer: BundleWriter, member: str) -> bytes:
    """Graph bytes whose larger initializers lie in the bundle."""
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.nbytes < 1024:
            continue
        dtype = _DTYPES[tensor.data_type]
        stored = writer.add_weight(np.ascontiguousarray(array).tobytes(), dtype, array.shape, (member, tensor.name))
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", STORED_LOCATION), ("offset", stored.offset), ("length", stored.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
    return model.SerializeToString()


def _specs(values) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name=value.name,
            dtype=_DTYPES[value.type.tensor_type.elem_type],
            axes=tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim),
        )
        for value in values
    )


def _graph_entry(member: str, model: onnx.ModelProto, backend: GraphBackend) -> GraphEntry:
    return GraphEntry(
        member=member,
        backend=backend,
        role="forward_native" if ".native." in member else "forward",
        ir_version=model.ir_version,
        opsets={opset.domain: opset.version for opset in model.opset_import},
        inputs=_specs(model.graph.input),
        outputs=_specs(model.graph.output),
        operators=Counter(f"{node.domain or 'ai.onnx'}::{node.op_type}" for node in model.graph.node),
    )


def write_bundle(
    path: Path,
    target: onnx.ModelProto,
    info: ModelInfo,
    draft: onnx.ModelProto | None = None,
    draft_info: ModelInfo | None = None,
    draft_kind: Literal["model", "self", "ngram", "none"] = "ngram",
    config: DflashConfig | None = None,
    certificate: Certificate | None = None,
    tokenizer: dict[str, bytes] | None = None,
    min_onnxruntime: str = "1.20",
    n_shared: int | None = None,
    backend: GraphBackend = "cpu",
    native: onnx.ModelProto | None = None,
    kernels: Sequence[CompiledKernel] = (),
    shared: bool = False,
) -> Path:
    """Write a complete bundle; `native` is the target again, with the project's own operators."""
    plan = plan_kv(info, draft_info, max_length=info.max_length, rollback_slack=17, shared=shared)
    if config is None:
        kinds = ["ngram", draft_kind] if draft is not None else [draft_kind]
        config = DflashConfig(proposers={kind: Proposer() for kind in kinds if kind != "none"})
    certificate = certificate or Certificate(verdict="pass", device="toy")
    with BundleWriter(path) as writer:
        graphs = {"target/graph.onnx": target} | ({"draft/graph.onnx": draft} if draft is not None else {})
        graphs |= {"target/graph.native.onnx": native} if native is not None else {}
        stored = {member: externalise(model, writer, member) for member, model in graphs.items()}
        entries = {member: _graph_entry(member, model, backend) for member, model in graphs.items()}
        for member, data in stored.items():
            writer.add(member, data)
        draft_model = None
        if draft is not None and draft_info is not None:
            draft_model = ModelEntry(info=draft_info, graphs=(entries["draft/graph.onnx"],))
        for kernel in kernels:
            writer.add(kernel_entry(kernel).member, kernel.code)
        writer.add(PLAN_NAMES[backend], dump_plan(plan))
        writer.add(DFLASH_CONFIG_NAME, dump_config(config))
        names = [writer.add(f"tokenizer/{name}", data).name for name, data in (tokenizer or {}).items()]
        writer.add(CERTIFICATE_NAME, dump_certificate(certificate))
        writer.seal(
            Manifest(
                name="toy",
                created_by={"dsc": "0"},
                requires=Requires(min_onnxruntime=min_onnxruntime, ir_version=10, opsets={"": 21}),
                target=ModelEntry(info=info, graphs=tuple(entry for name, entry in entries.items() if name[0] == "t")),
                draft=DraftEntry(kind=draft_kind, model=draft_model, n_shared=n_shared),
                tokenizer=TokenizerEntry(members=tuple(names)),
                kernels=tuple(map(kernel_entry, kernels)),
            )
        )
    return path


def toy_bundle(
    path: Path,
    table: np.ndarray,
    draft_table: np.ndarray | None = None,
    draft_kind: Literal["model", "self", "ngram", "none"] = "ngram",
    max_length: int = 64,
    draft_max_length: int | None = None,
    eos_ids: tuple[int, ...] = (),
    history: bool = True,
    **options,
) -> Path:
    """A bundle of scripted language models; see `scripted_lm`."""
    vocab = table.shape[1]
    info = toy_info(vocab, max_length, eos_ids)
    if draft_table is None:
        return write_bundle(path, scripted_lm(table, history), info, draft_kind=draft_kind, **options)
    return write_bundle(
        path,
        scripted_lm(table, history),
        info,
        draft=scripted_lm(draft_table, history, position_ids=False),
        draft_info=toy_info(draft_table.shape[1], draft_max_length or max_length),
        draft_kind=draft_kind if draft_kind in ("model", "self") else "model",
        **options,
    )
