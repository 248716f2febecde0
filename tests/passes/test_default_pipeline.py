import numpy as np
import onnx_ir as ir
import pytest
from forward_graphs import N_LAYERS, forward_graph, step_feeds
from pass_graphs import ops, run

from dsc.bundle_schema.errors import RequestError
from dsc.passes import default_pipeline
from dsc.passes.attach_bodies import AttachBodiesPass
from dsc.passes.pipeline import run_pipeline


def compiled(**options):
    model = forward_graph()
    run_pipeline(model, default_pipeline(**options, max_positions=64))
    return model


def reference():
    """The exported graph itself, its attention computed by the function body."""
    model = forward_graph()
    AttachBodiesPass()(model)
    return model


def both_steps(model, dtype=np.float32):
    """Logits of a prompt of 6 and of 3 more tokens, the pools handed on."""
    feeds = step_feeds(0, 6, dtype)
    first = run(model, feeds)
    pools = {name: first[name.replace("pool.", "pool_out.")] for name in feeds if "_pool." in name}
    second = run(model, step_feeds(6, 3, dtype) | pools)
    return np.concatenate([first["logits"], second["logits"]], axis=1)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"precision": "fp32"}, 1e-5),
        ({"precision": "int8"}, 0.05),
        ({"precision": "int8", "native": True}, 0.05),
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


def test_the_native_pipeline_leaves_block_products_with_their_body():
    model = compiled(precision="int4", native=True)
    assert "BlockMatMul" in ops(model)
    assert "MatMulNBits" not in ops(model)
    assert [function.name for function in model.functions.values()] == ["BlockMatMul"]


def test_projections_are_merged_only_where_that_was_faster():
    names = {p: [one.name for one in default_pipeline(precision=p)] for p in ("fp32", "int4")}
    assert "merge-qkv" not in names["fp32"]
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


def test_options_reach_quantisation():
    passes = {p.name: p for p in default_pipeline(precision="int4", quantize={"block": 64, "exclude": ("x",)})}
    assert str(passes["quantize-weights"]) == "quantize-weights{block=64,exclude=x}"
    with pytest.raises(RequestError):
        default_pipeline(precision="int8", quantize={"accuracy_level": 0})
