import numpy as np
import onnx_ir as ir
import pytest
from forward_graphs import N_LAYERS, forward_graph, step_feeds
from native_operator import library
from pass_graphs import ops, run

from dsc.bundle_schema.errors import RequestError
from dsc.passes.attach_bodies import AttachBodiesPass
from dsc.passes.block_quantisation import quantise_symmetric
from dsc.passes.pass_order import (
    carried_blocks,
    default_pipeline,
    kernel_passes,
    layout_passes,
    shared_passes,
    why_not_native,
)
from dsc.passes.pipeline import run_pipeline


def compiled(kernels="ort", precision="fp32", **options):
    model = forward_graph()
    run_pipeline(model, default_pipeline(kernels, precision, **options, max_positions=64))
    return model


def both_kernels(precision, **options):
    """The two CPU graphs of one model, made as the compiler makes them."""
    shared = forward_graph()
    run_pipeline(shared, [*shared_passes(precision, **options), *layout_passes(["ort", "native"])])
    graphs = [shared.clone(), shared.clone()]
    for graph, kernels in zip(graphs, ("ort", "native"), strict=True):
        run_pipeline(graph, kernel_passes(kernels, precision, 64))
    return graphs


def reference():
    """The exported graph itself, its attention computed by the function body."""
    model = forward_graph()
    AttachBodiesPass()(model)
    return model


def run_step(model, feeds, library=None):
    """One sequence; packed graphs are told that all rows are its."""
    if any(value.name == "row_offsets" for value in model.graph.inputs):
        feeds = feeds | {"row_offsets": np.array([0, feeds["input_ids"].shape[1]], np.int32)}
    return run(model, feeds, library=library)


def both_steps(model, dtype=np.float32, library=None):
    """Logits of a prompt of 6 and of 3 more tokens, the pools handed on."""
    feeds = step_feeds(0, 6, dtype)
    first = run_step(model, feeds, library)
    pools = {name: first[name.replace("pool.", "pool_out.")] for name in feeds if "_pool." in name}
    second = run_step(model, step_feeds(6, 3, dtype) | pools, library)
    return np.concatenate([first["logits"], second["logits"]], axis=1)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"precision": "fp32"}, 1e-5),
        ({"precision": "int8"}, 0.05),
        ({"precision": "int8", "kernels": "native"}, 0.05),
        ({"precision": "keep", "kernels": "native"}, 0.05),
        ({"precision": "fp32", "kernels": "native"}, 1e-5),
        ({"precision": "fp16"}, 0.01),
    ],
)
def test_the_pipeline_keeps_what_the_graph_computes(options, limit):
    dtype = np.float16 if options["precision"] == "fp16" else np.float32
    wanted, got = both_steps(reference()), both_steps(compiled(**options), dtype)
    assert got.dtype == np.float32
    assert np.abs(got - wanted).max() < limit * np.ptp(wanted)


def test_a_tied_model_is_stored_once_and_names_do_not_depend_on_the_exporter():
    model = compiled()
    bytes_now = sum(v.const_value.nbytes for v in model.graph.initializers.values())
    parameters = sum(v.const_value.nbytes for v in forward_graph().graph.initializers.values())
    tables = sum(v.const_value.nbytes for n, v in model.graph.initializers.items() if n.startswith("rotary_"))
    assert bytes_now - tables <= parameters + 256
    assert ops(model).count("GroupQueryAttention") == N_LAYERS
    assert "Transpose" not in ops(model)
    assert "ai.dspark" not in model.opset_imports


def test_int4_keeps_no_float_matrix():
    model = compiled(precision="int4")
    kept = [v for v in model.graph.initializers.values() if v.dtype == ir.DataType.FLOAT and v.const_value.size > 2048]
    assert [v.name for v in kept if not str(v.name).endswith(("scales", "by_block")) and "rotary" not in v.name] == []


def test_native_graphs_keep_the_projects_operators():
    model = compiled("native", "int4")
    names = ops(model)
    assert names.count("QkvAttention") == names.count("SwiGlu") == N_LAYERS
    assert names.count("InterleavedMatMul") == 2 * N_LAYERS + 1
    assert names.count("InterleavedMatMulSkipNorm") == 2 * N_LAYERS
    assert names.count("InterleavedGather") == 1
    assert not {
        "MatMulNBits",
        "BlockMatMul",
        "GatherBlockQuantized",
        "VerifyAttention",
        "Split",
        "RotaryEmbedding",
    } & set(names)
    assert {function.name for function in model.functions.values()} == {
        "InterleavedGather", "InterleavedMatMul", "InterleavedMatMulSkipNorm", "QkvAttention", "SwiGlu",
    }  # fmt: skip


def test_a_native_float_graph_multiplies_by_the_checkpoints_rows():
    model = compiled("native", "fp32")
    names = ops(model)
    assert names.count("QkvAttention") == names.count("SwiGlu") == N_LAYERS
    assert names.count("DenseMatMul") == 2 * N_LAYERS + 1
    assert names.count("DenseMatMulSkipNorm") == 2 * N_LAYERS
    assert not {"MatMul", "FusedMatMul", "VerifyAttention", "Split", "RotaryEmbedding"} & set(names)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_the_native_library_computes_what_the_bodies_compute(precision):
    ort, native = both_kernels(precision)
    wanted, body, got = both_steps(ort), both_steps(native), both_steps(native, library=library())
    limit = 1e-5 if precision == "fp32" else 0.05
    assert np.abs(got - wanted).max() < limit * np.ptp(wanted)
    assert np.abs(got - body).max() < limit * np.ptp(wanted)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_native_rows_do_not_depend_on_their_neighbours(precision):
    _, native = both_kernels(precision)
    feeds = step_feeds(0, 17)
    together = run_step(native, feeds, library())["logits"]
    for rows in (1, 2, 5, 16):
        fewer = {name: array[:, :rows] for name, array in feeds.items() if name.endswith("_ids")}
        got = run_step(native, feeds | fewer | {"logit_rows": np.arange(rows)}, library())["logits"]
        np.testing.assert_array_equal(got, together[:, :rows])


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_both_kernel_sets_have_the_same_large_tensors(precision):
    contents = [
        {v.const_value.tobytes() for v in graph.graph.initializers.values() if v.const_value.nbytes >= 4096}
        for graph in both_kernels(precision)
    ]
    assert contents[0] == contents[1]


def test_projections_are_merged_only_where_that_was_faster():
    names = {p: [one.name for one in default_pipeline(precision=p)] for p in ("fp16", "fp32", "int4")}
    assert "merge-qkv" not in names["fp16"]
    assert "merge-qkv" in names["fp32"]
    assert names["int4"].index("quantize-embedding") < names["int4"].index("merge-qkv")
    assert ops(compiled(precision="int4")).count("MatMulNBits") == 4 * N_LAYERS + 1


def test_symbolic_axes_stay():
    for precision in ("fp32", "int4"):
        graph = compiled(precision=precision).graph
        axes = {v.name: [str(d) for d in v.shape] for v in [*graph.inputs, *graph.outputs]}
        assert axes["input_ids"] == ["batch", "seq"]
        assert axes["logits"][:2] == ["batch", "rows"]
        assert axes["k_pool.0"] == axes["k_pool_out.0"] == ["batch", "2", "max_rows", "16"]


def test_batches():
    model, plain = compiled(), reference()
    for batch, seq, past in ((2, 1, 5), (3, 1, 0), (2, 4, 0), (3, 4, 0)):
        feeds = step_feeds(past, seq, batch=batch)
        np.testing.assert_allclose(run(model, feeds)["logits"], run(plain, feeds)["logits"], rtol=1e-4, atol=1e-4)


def test_long_contexts_keep_their_rotary_nodes():
    names = {p.name: p for p in default_pipeline(max_positions=1 << 20)}
    assert names["lower-attention"].fold_rotary is False
    assert default_pipeline("cuda")[-5].name == "to-float16"


def test_packed_projections_survive_a_rotary_embedding_that_stays():
    shared = forward_graph()
    run_pipeline(shared, [*shared_passes("int8"), *kernel_passes("ort", "int8", 1 << 20)])
    assert "RotaryEmbedding" in ops(shared)
    wanted, got = both_steps(reference()), both_steps(shared)
    assert np.abs(got - wanted).max() < 0.05 * np.ptp(wanted)


def test_options_reach_quantisation():
    passes = {p.name: p for p in default_pipeline(precision="int4", block=64, exclude=("x",), head_precision="int4")}
    assert str(passes["quantize-weights"]) == "quantize-weights{block=64,head_bits=4,exclude=x}"
    assert passes["quantize-weights"].bits == 4
    for wrong in ({"block": 48}, {"head_precision": "fp16"}):
        with pytest.raises(RequestError):
            default_pipeline(precision="int8", **wrong)


def test_the_head_may_keep_its_floats():
    model = compiled(precision="int4", head_precision="fp32")
    assert ops(model)[-1] == "FusedMatMul"
    assert ops(model).count("MatMulNBits") == 4 * N_LAYERS


def test_why_a_graph_is_not_for_the_native_kernels():
    for options, why in (
        ({"precision": "int4"}, ""),
        ({"precision": "fp32"}, ""),
        ({"precision": "int4", "block": 64}, "blocks of 32 weights only, got 64"),
    ):
        model = forward_graph()
        run_pipeline(model, [*shared_passes(**options), *layout_passes(["native"])])
        assert why in why_not_native(model, options["precision"])
        assert bool(why) == bool(why_not_native(model, options["precision"]))
    assert "float32" in why_not_native(forward_graph(), "fp16")
    by_rows = forward_graph()
    run_pipeline(by_rows, shared_passes("int4"))
    assert "interleaved matrices, and layer0.q" in why_not_native(by_rows, "int4")
    half = forward_graph()
    next(v for v in half.graph.inputs if v.name == "k_pool.0").type = ir.TensorType(ir.DataType.FLOAT16)
    assert "float32" in why_not_native(half, "int4")


def test_blocks_of_the_asked_width_are_carried():
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    four, eight = (quantise_symmetric(weight, bits, 32) for bits in (4, 8))
    blocks = {"layer0.q": four, "layer0.k": eight, "model.embed": eight}
    model = forward_graph()
    names = {p: set(carried_blocks(model, p, blocks)) for p in ("keep", "int4", "int8", "fp32", "fp16")}
    assert names == {
        "keep": set(blocks),
        "int4": {"layer0.q", "model.embed"},  # the head is int8 unless asked otherwise
        "int8": {"layer0.k", "model.embed"},
        "fp32": set(),
        "fp16": set(),
    }
    assert set(carried_blocks(model, "int4", blocks, "int4")) == {"layer0.q"}
