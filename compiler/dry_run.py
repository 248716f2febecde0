"""`dsc compile --dry-run`: what would be done, and about how large it would be, from configurations alone."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from dsc.bundle_schema.dflash_config import MAX_WINDOW
from dsc.bundle_schema.kv_layout import layer_rows
from dsc.compiler.console import format_nbytes
from dsc.compiler.gpu_kernels import AttentionNeed, attention_needs, estimate
from dsc.compiler.hf_info import max_length as longest
from dsc.compiler.onnx_external import onnx_file
from dsc.compiler.onnx_facts import StatedFacts
from dsc.compiler.plan_kv import check_positions
from dsc.compiler.request import Backend, CompileRequest, DraftKind, Kernels, Precision, WeightOptions
from dsc.compiler.request_checks import check_request
from dsc.compiler.sources import GGUF_SUFFIX, require_source
from dsc.compiler.stages import STAGES
from dsc.runtime.host import choose_threads

# Bytes a weight: codes, and a float32 scale for each block of 32.
_NBYTES = {Precision.FP32: 4.0, Precision.FP16: 2.0, Precision.INT8: 1.125, Precision.INT4: 0.625}
_NBYTES_IN_INT16 = 2.125
_KINDS_IN_INT16 = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q8_0"})
"""GGML types whose floats, as a rule, are 16-bit numbers and a scale a block: see the pass weights-in-int16."""


def dry_run_report(request: CompileRequest) -> dict[str, Any]:
    """Stages, sizes and memory of a compile, without reading a weight or writing a byte.

    Raises:
        RequestError, HostError: as `check_request`.
        ModelError: a source is missing or its configuration cannot be read.
        PlanError: the target has fewer positions than were asked for.
    """
    check_request(request)
    stated = StatedFacts(request.max_length, request.eos_ids)
    report: dict[str, Any] = {
        "output": str(request.output),
        "stages": ", ".join(STAGES),
        "draft kind": str(request.draft.kind),
        "target": _describe(request.target, request.weights, request.max_length, stated, request.kernels),
    }
    if request.draft.kind is DraftKind.SELF:
        report["draft"] = _describe(request.target, request.draft, request.max_length, stated, request.kernels)
    elif request.draft.source is not None:
        stated = StatedFacts(request.draft.max_length, eos_ids=())
        source, length = request.draft.source, request.max_length
        report["draft"] = _describe(source, request.draft, length, stated, request.kernels)
    report |= _gpu_report(request, [report[owner].pop("needs") for owner in ("target", "draft") if owner in report])
    models = [report[owner] for owner in ("target", "draft") if owner in report]
    positions = [model.pop("positions") for model in models]  # a draft with fewer is not asked past them
    check_positions(models[0]["architecture"], positions[0], models[0]["max length"])
    report["bundle about"] = format_nbytes(sum(_nbytes_in_bundle(model, request) for model in models))
    needs = [model.pop("kv_nbytes") for model in models]
    # A draft of the target's own weights continues the target's cache where their rows look the same.
    shared = request.draft.kind is DraftKind.SELF and request.weights.precision is not Precision.FP16
    report["KV memory about"] = format_nbytes(needs[0] if shared else sum(needs))
    report["peak memory about"] = format_nbytes(1.5 * max(model.pop("fp32_nbytes") for model in models) + (400 << 20))
    return report


def _nbytes_in_bundle(model: dict[str, Any], request: CompileRequest) -> float:
    """The weights; graphs for CUDA share blocks with those for the CPU, and have float weights in half precision."""
    nbytes: float = model.pop("weights_nbytes")
    n_in_int16: int = model.pop("n_in_int16")
    if model["precision"] != Precision.FP32:
        return nbytes
    if Backend.CUDA in request.backends:
        return nbytes * 1.5
    spared = _NBYTES[Precision.FP32] - _NBYTES_IN_INT16 if request.kernels is Kernels.NATIVE else 0.0
    return nbytes - spared * n_in_int16


def _gpu_report(request: CompileRequest, needs: list[set[AttentionNeed]]) -> dict[str, Any]:
    """Graphs and kernels for GPUs; nothing where none are asked for."""
    targets = request.gpu_architectures()
    if not targets:
        return {}
    return {
        "backends": ", ".join(request.backends),
        "GPU kernels": estimate(sorted(set().union(*needs)), targets, choose_threads(request.threads)),
    }


def _describe(
    path: Path, weights: WeightOptions, max_length: int | None, stated: StatedFacts, kernels: Kernels
) -> dict[str, Any]:
    require_source(path)
    graph = onnx_file(path)
    if graph is not None:
        return _describe_graph(graph, weights, max_length, stated)
    config, n_parameters, n_in_int16, carried_nbytes = _read_config(path)
    precision = weights.precision
    if precision is Precision.KEEP and carried_nbytes is None:
        precision = Precision.FP32
    size = carried_nbytes if precision is Precision.KEEP else _NBYTES[precision] * n_parameters
    architecture = ", ".join(getattr(config, "architectures", None) or [config.model_type])
    positions = longest(config)
    length = max_length or positions
    n_heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // n_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or n_heads)
    n_layers = int(config.num_hidden_layers)
    per_row = 2 * kv_heads * head_dim * 4
    has_rings = kernels is Kernels.NATIVE and precision is not Precision.FP16
    windows = _windows(config, n_layers) if has_rings else [None] * n_layers
    return {
        "source": str(path),
        "architecture": architecture,
        "layers": n_layers,
        "parameters": n_parameters,
        "precision": str(precision),
        "max length": length,
        "positions": positions,
        "KV bytes per token": n_layers * per_row,
        "weights_nbytes": size,
        "n_in_int16": n_in_int16,
        "kv_nbytes": per_row * sum(layer_rows(window, length, MAX_WINDOW + 1)[0] for window in windows),
        "fp32_nbytes": 4 * n_parameters,
        "needs": {AttentionNeed(head_dim, bool(getattr(config, "attn_logit_softcapping", None)))},
    }


def _windows(config: Any, n_layers: int) -> list[int | None]:
    """The sliding window of each layer, as configurations of transformers state them."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * n_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _describe_graph(path: Path, weights: WeightOptions, max_length: int | None, stated: StatedFacts) -> dict[str, Any]:
    """The same of an ONNX model, whose graph is read and whose weights are not."""
    from dsc.compiler.onnx_adopt import adopt_onnx

    adopted = adopt_onnx(path, stated)
    info = adopted.info
    initializers = adopted.model.graph.initializers.values()
    kept = sum(value.const_value.nbytes for value in initializers if value.const_value is not None)
    precision = Precision.FP32 if weights.precision is Precision.KEEP else weights.precision
    length = max_length or info.max_length
    per_token = sum(2 * layer.n_kv_heads * layer.head_dim * 4 for layer in info.kv_layers)
    return {
        "source": str(path),
        "architecture": info.architecture,
        "layers": info.n_layers,
        "parameters": info.n_parameters,
        "precision": info.quantization if info.quantization != "none" else str(precision),
        "max length": length,
        "positions": info.max_length,
        "KV bytes per token": per_token,
        "n_in_int16": 0,
        "weights_nbytes": kept if precision is Precision.FP32 else _NBYTES[precision] * info.n_parameters,
        "kv_nbytes": per_token * length,
        "fp32_nbytes": kept,
        "needs": set(attention_needs([(info, adopted.model)])),
    }


def _read_config(path: Path) -> tuple[Any, int, int, int | None]:
    """Configuration, number of parameters and of those that fit 16 bits, and the bytes of a GGUF file's own tensors."""
    require_source(path)
    if path.is_file() and path.suffix.lower() == GGUF_SUFFIX:
        from dsc.compiler.gguf_config import gguf_config
        from dsc.compiler.gguf_reader import open_gguf

        file = open_gguf(path)
        n_parameters = sum(prod(tensor.shape) for tensor in file.tensors)
        matrices = [tensor for tensor in file.tensors if len(tensor.shape) == 2]
        n_in_int16 = sum(prod(matrix.shape) for matrix in matrices if matrix.kind in _KINDS_IN_INT16)
        return gguf_config(file).get_text_config(decoder=True), n_parameters, n_in_int16, path.stat().st_size
    import torch
    from transformers import AutoModelForCausalLM

    from dsc.compiler.hf_files import load_config

    config = load_config(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return config.get_text_config(decoder=True), sum(weight.numel() for weight in model.parameters()), 0, None
