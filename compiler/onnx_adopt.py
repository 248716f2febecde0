"""Adopt a decoder that was exported to ONNX elsewhere, whatever its data files are called."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from dsc.bundle_schema.errors import ModelError
from dsc.compiler.exported import ExportedModel
from dsc.compiler.onnx_external import read_onnx
from dsc.compiler.onnx_facts import StatedFacts, adopted_info, cache_heads, read_files
from dsc.compiler.onnx_ports import cache_names, find_ports
from dsc.compiler.onnx_wrap import infer_types, to_pools, upgrade_operators
from dsc.passes.float_weights import FloatWeightsPass
from dsc.passes.quantize_weights import DEPENDS_ON_OTHERS, scaled_over_the_tensor


def adopt_onnx(path: Path, stated: StatedFacts = StatedFacts()) -> ExportedModel:  # noqa: B008 - frozen
    """Read an ONNX decoder and bring it to the forward-graph convention; its weights stay in their files.

    A graph that has the convention is taken as it is. One that takes an attention mask and past keys and values, and
    returns logits and present ones, is wrapped exactly (`onnx_wrap`).

    Args:
        path: the ONNX file; configuration and tokenizer files are looked for beside it.
        stated: what those files do not say.

    Raises:
        ModelError: it cannot be read, is no decoder with a cache, uses its cache in another way, quantises activations
            over a whole tensor, or something about it is stated nowhere.
    """
    where = str(path)
    files = read_files(path.absolute().parent)
    model = read_onnx(path)
    FloatWeightsPass()(model)
    _refuse_dynamic_quantisation(model, where)
    for value in [value for value in model.graph.inputs if str(value.name) in model.graph.initializers]:
        model.graph.inputs.remove(value)  # older graphs list their constants among the inputs
    ports = find_ports(model.graph, cache_names(files.genai), where)
    heads = cache_heads(ports, files, where)
    name = path.absolute().parent.name if path.stem == "model" else path.stem
    info = adopted_info(model, ports, heads, files, stated, where).model_copy(update={"name": name})
    upgrade_operators(model, where)
    if not ports.pools:
        to_pools(model, ports, heads, where)
    infer_types(model)
    kept = [value for value in model.graph.outputs if value.name not in ports.ignored]
    model.graph.outputs[:] = kept
    notes = ["logits were not compared with another framework's: the model came as a graph"]
    if ports.ignored:
        notes.append(f"outputs that nothing reads were dropped: {', '.join(ports.ignored)}")
    return ExportedModel(
        model=model,
        info=info,
        tokenizer=files.tokenizer,
        source=f"ONNX file {path.name}",
        notes=tuple(notes),
    )


def _refuse_dynamic_quantisation(model: ir.Model, where: str) -> None:
    node = scaled_over_the_tensor(model)
    if node is not None:
        hint = "give the float model; `--precision int8` or `int4` quantises it row by row"
        raise ModelError(f"{where}, node {node.name!r}", f"{node.op_type} {DEPENDS_ON_OTHERS}", hint)
