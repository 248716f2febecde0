"""The graphs for CUDA, run by onnxruntime's CPU provider, which has the same operators in half precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from chunked_forward import CUTS, logits_in_chunks
from exported_families import exported_family, reference_logits
from tiny_models import FAMILIES

from dsc.compiler.build_graphs import BuiltModel, build_graphs
from dsc.compiler.request import build_request

QUICK = {"llama", "gemma2"}
# The CPU provider has no ScatterElements in half precision, which the router of deepseek_v3 uses.
RUNNABLE = [family for family in FAMILIES if family != "deepseek_v3"]


def built(family: str, precision: str, **options: Any) -> BuiltModel:
    asked = {"target": Path("m"), "output": Path("b"), "backends": "cuda", "weights": {"precision": precision}}
    request = build_request(asked | options)
    return build_graphs("target", exported_family(family), request.weights, request)


def cuda_graph(family: str, precision: str) -> ir.Model:
    (part,) = [part for part in built(family, precision).part.graphs if part.backend == "cuda"]
    assert (part.member, part.role) == ("target/graph.cuda.onnx", "forward")
    assert part.precision == ("fp16" if precision == "fp32" else precision)
    return part.model


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in QUICK else pytest.mark.slow) for family in RUNNABLE]
)
def test_half_precision_graphs_compute_what_the_framework_computes(family):
    info = exported_family(family).info
    ids, wanted = (array[0, : CUTS[-1]] for array in reference_logits(family))
    got = logits_in_chunks(cuda_graph(family, "fp32"), info, ids, np.float16)
    assert np.abs(got - wanted).max() < 1e-2 * np.ptp(wanted)


def is_constant(value: ir.Value) -> bool:
    """Whether onnxruntime can work a value out when it opens the graph."""
    node = value.producer()
    return value.const_value is not None if node is None else all(map(is_constant, node.inputs))


def test_blocks_keep_their_codes_and_have_half_precision_scales():
    model = cuda_graph("llama", "int8")
    products = [node for node in model.graph if node.op_type == "MatMulNBits"]
    assert len(products) >= 9
    for node in products:
        codes, scales = node.inputs[1:3]
        assert (codes.dtype, scales.dtype) == (ir.DataType.UINT8, ir.DataType.FLOAT16)
        assert is_constant(codes)
        assert is_constant(scales)
    info = exported_family("llama").info
    ids, wanted = (array[0, : CUTS[-1]] for array in reference_logits("llama"))
    got = logits_in_chunks(model, info, ids, np.float16)
    assert np.abs(got - wanted).max() < 5e-2 * np.ptp(wanted)


def sinks_of(model: ir.Model) -> set[ir.DataType]:
    """Types of the attention sinks."""
    nodes = [node for node in model.graph if node.op_type == "VerifyAttention" and len(node.inputs) > 6]
    return {node.inputs[6].dtype for node in nodes}


@pytest.mark.parametrize("family", QUICK)
def test_no_shape_is_put_together_at_run_time(monkeypatch, family):
    monkeypatch.setattr("dsc.compiler.build_graphs.HEAD_SIZES", (16,))
    for part in built(family, "fp32", cuda_attention="dspark").part.graphs:
        if part.backend == "cuda":
            assert "Shape" not in {node.op_type for node in part.model.graph}


@pytest.mark.parametrize(
    ("family", "head_sizes", "reason"),
    [
        ("llama", (16,), ""),
        ("llama", (64,), "head size 16 has none"),
        pytest.param("gpt_oss", (16,), "", marks=pytest.mark.slow),
    ],
)
def test_a_second_graph_leaves_attention_to_the_bundles_kernels_where_they_can(monkeypatch, family, head_sizes, reason):
    monkeypatch.setattr("dsc.compiler.build_graphs.HEAD_SIZES", head_sizes)
    made = built(family, "fp32", cuda_attention="dspark")
    graphs = {part.member: part for part in made.part.graphs if part.backend == "cuda"}
    missing = {"graph of the target for the bundle's own attention kernels": reason}
    assert made.left_out == (missing if reason else {})
    assert graphs.keys() == {"target/graph.cuda.onnx"} | (set() if reason else {"target/graph.cuda.native.onnx"})
    if not reason:
        ours = graphs["target/graph.cuda.native.onnx"]
        assert ours.role == "forward_native"
        kinds = [node.op_type for node in ours.model.graph]
        assert ("VerifyAttention" in kinds, "GroupQueryAttention" in kinds) == (True, False)
        assert sinks_of(ours.model) == ({ir.DataType.FLOAT} if family == "gpt_oss" else set())
