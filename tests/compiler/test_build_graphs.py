"""The finished graphs: right for every family, alike in their weights, and reported where something was not done."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from chunked_forward import CUTS, logits_in_chunks
from exported_families import exported_family, reference_logits
from native_operator import library
from pass_graphs import ops
from tiny_models import FAMILIES

from dsc.bundle_schema.errors import PassError
from dsc.bundle_schema.tensors import DType
from dsc.compiler.build_graphs import build_graphs
from dsc.compiler.gguf_blocks import BlockWeight
from dsc.compiler.request import CompileRequest, build_request
from dsc.passes.block_quantisation import quantise_symmetric
from dsc.passes.pass_order import kernel_passes, shared_passes
from dsc.passes.pipeline import load_pass, parse_pipeline, run_pipeline

# Normalised queries and keys, or a rotary embedding written out, keep attention and projections apart.
APART = {"qwen3", "qwen3_moe", "gemma3_text", "olmo2", "gpt_oss", "deepseek_v3"}


def request(**options) -> CompileRequest:
    return build_request({"target": Path("model"), "output": Path("bundle"), **options})


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_graphs_compute_what_the_framework_computes(family):
    exported = exported_family(family)
    ids, wanted = (array[0, : CUTS[-1]] for array in reference_logits(family))
    shared = exported.model.clone()
    run_pipeline(shared, [*shared_passes("fp32"), *parse_pipeline("merge-qkv,merge-gate-up")])
    ort, native = shared, shared.clone()
    run_pipeline(ort, kernel_passes("ort", "fp32", 64))
    run_pipeline(native, kernel_passes("native", "fp32", 64))
    assert ("QkvAttention" in ops(native)) == (family not in APART)
    for model, kernels in ((ort, None), (native, None), (native, library())):
        got = logits_in_chunks(model, exported.info, ids, library=kernels)
        assert np.abs(got - wanted).max() < 1e-4 * np.ptp(wanted)


def test_both_graphs_are_built_from_the_same_weights():
    built = build_graphs("target", exported_family("llama"), request(weights={"precision": "int4"}).weights, request())
    assert [(part.member, part.role) for part in built.part.graphs] == [
        ("target/graph.onnx", "forward"),
        ("target/graph.native.onnx", "forward_native"),
    ]
    assert built.notes == ()
    ort, native = (
        {v.const_value.tobytes() for v in part.model.graph.initializers.values() if v.const_value.nbytes >= 1024}
        for part in built.part.graphs
    )
    assert native <= ort
    assert len(ort - native) <= 2  # cosines and sines of onnxruntime's attention


@pytest.mark.parametrize(
    ("weights", "note"),
    [
        ({"precision": "int4", "block_size": 64}, "blocks of 32 weights only, got 64"),
        ({"precision": "fp16"}, "float32 only"),
    ],
)
def test_a_graph_that_the_native_kernels_cannot_run_is_left_out_with_a_note(weights, note):
    asked = request(weights=weights)
    built = build_graphs("target", exported_family("llama"), asked.weights, asked)
    assert [part.role for part in built.part.graphs] == ["forward"]
    assert note in built.notes[0]
    pools = DType.FLOAT16 if weights["precision"] == "fp16" else DType.FLOAT32
    assert built.part.info.kv_dtype is pools


def four_bit_family(bits_of_q: int = 4):
    """The tiny Llama as if its matrices came from a 4-bit file."""
    exported = exported_family("llama")
    blocks = {}
    for name, value in exported.model.graph.initializers.items():
        if "_proj" in name:
            made = quantise_symmetric(value.const_value.numpy(), bits_of_q if "q_proj" in name else 4, 32)
            blocks[name] = BlockWeight(made.bits, made.qweight, made.scales, made.mins, "Q4_0", True, 0.0)
    return replace(exported, block_weights=blocks)


def weight_bytes(built) -> Counter[bytes]:
    graph = built.part.graphs[-1].model.graph
    return Counter(v.const_value.tobytes() for v in graph.initializers.values() if v.const_value.nbytes >= 1024)


def test_four_bit_blocks_are_not_rounded_to_four_bits_again():
    exported = four_bit_family()
    asked, kept = request(weights={"precision": "int4"}), request(weights={"precision": "keep"})
    built = build_graphs("target", exported, asked.weights, asked)
    assert "14 matrices are Q4_0 in the checkpoint and were carried" in built.notes[0]
    assert weight_bytes(built) == weight_bytes(build_graphs("target", exported, kept.weights, kept))


def test_other_widths_are_rounded_as_asked():
    exported = four_bit_family(bits_of_q=8)
    asked = request(weights={"precision": "int8"})
    built = build_graphs("target", exported, asked.weights, asked)
    assert "2 matrices" in built.notes[0]
    widths = {
        node.attributes["bits"].value
        for node in built.part.graphs[-1].model.graph
        if node.op_type == "InterleavedMatMul"
    }
    assert widths == {8}


@pytest.mark.parametrize(("precision", "nbytes"), [("fp32", 4), ("fp16", 2), ("int8", 1), ("int4", 1)])
def test_a_matrix_that_is_embedding_and_head_is_stored_once(precision, nbytes):
    asked = request(weights={"precision": precision})
    exported = exported_family("smollm3")
    assert exported.info.vocab_size * exported.info.hidden_size == 320 * 64
    built = build_graphs("target", exported, asked.weights, asked)
    stored = {v.const_value.tobytes() for part in built.part.graphs for v in part.model.graph.initializers.values()}
    sizes = Counter(map(len, stored))
    assert {size: sizes[320 * 64 * size] for size in (4, 2, 1) if sizes[320 * 64 * size]} == {nbytes: 1}


def nothing_defines(model):
    list(model.graph)[-1].replace_input_with(0, ir.Value(name="nowhere"))


def lost_output(model):
    model.graph.outputs.pop()
    model.graph.outputs.append(ir.Value(name="v_pool_out.1", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([])))


@pytest.mark.parametrize("damage", [nothing_defines, lost_output])
@pytest.mark.parametrize("name", ["fold-constants", "lower-attention", "pack-rows"])
def test_a_pass_that_breaks_the_graph_ends_the_compile_with_its_name(monkeypatch, name, damage):
    broken = load_pass(name)
    call = broken.call

    def call_and_break(self, model):
        result = call(self, model)
        damage(model)
        return result

    monkeypatch.setattr(broken, "call", call_and_break)
    with pytest.raises(PassError, match=rf"^pass {name}[:{{].*passes already run: "):
        build_graphs("target", exported_family("llama"), request().weights, request())


def test_a_users_pipeline_replaces_the_shared_passes():
    asked = request(weights={"precision": "int4"}, passes={"pipeline": "fold-constants"})
    built = build_graphs("target", exported_family("llama"), asked.weights, asked)
    assert [run.spec for run in built.reports["target"].runs] == [
        "fold-constants",
        "interleave-columns",
        "weights-in-bfloat16",
        "weights-in-int16",
    ]
    native = built.part.graphs[1].model
    assert "VerifyAttention" in ops(native)
    assert "InterleavedMatMul" not in ops(native)
    assert "parts of one value" in str(built.reports["target native"].runs[0].skipped[0])


@pytest.mark.parametrize(
    ("weights", "passes", "note", "described"),
    [
        ({"precision": "int4", "exclude": ["beam"]}, {}, "exclude 'beam' changes nothing: no matrix has", "int4"),
        ({"exclude": ["q_proj"]}, {}, "exclude changes nothing: the weights stay fp32", "fp32"),
        ({"precision": "int4"}, {"pipeline": "fold-constants"}, "precision changes nothing: the passes", "fp32"),
        ({"block_size": 64}, {"pipeline": "quantize-weights{bits=8}"}, "block_size changes", "by the given passes"),
        ({}, {"dump_after": ["quantize-weights"]}, "no graph after quantize-weights: the pass did not run", "fp32"),
    ],
)
def test_what_is_asked_and_not_done_is_noted(tmp_path, weights, passes, note, described):
    folder = {"dump_dir": tmp_path} if "dump_after" in passes else {}
    asked = request(weights=weights, passes=passes | folder)
    built = build_graphs("target", exported_family("llama"), asked.weights, asked)
    assert [found for found in built.notes if found.startswith(f"target: {note}")]
    assert built.part.info.quantization == described
    assert list(tmp_path.iterdir()) == []


def test_rotary_tables_are_as_long_as_the_request():
    asked = request(max_length=40)
    built = build_graphs("target", exported_family("llama"), asked.weights, asked)
    tables = [v for n, v in built.part.graphs[0].model.graph.initializers.items() if n.startswith("rotary")]
    assert {v.const_value.shape[0] for v in tables} == {40 + 17}


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("mistral", {}, "all"),
        ("gemma3_text", {}, "sliding"),
        ("gpt_oss", {}, "sliding"),
        ("llama", {}, "none"),
        ("gemma3_text", {"kernels": "ort"}, "none"),
        ("gemma3_text", {"weights": {"precision": "fp16"}}, "none"),
    ],
    ids=str,
)
def test_windows_may_be_rings_where_the_native_kernels_run_them(family, options, expected):
    exported, asked = exported_family(family), request(backends=("cpu", "cuda"), **options)
    built = build_graphs("target", exported, asked.weights, asked)
    sliding = {index for index, layer in enumerate(exported.info.kv_layers) if layer.window is not None}
    assert (len(sliding) == len(exported.info.kv_layers)) == (expected == "all")
    assert built.part.info.rings == (frozenset() if expected == "none" else sliding)
    assert built.part.info_on("cpu").rings == built.part.info.rings
    assert built.part.info_on("cuda").rings == frozenset()
