"""The graphs for CUDA compute what the model does: in half precision on the CPU, where all their operators exist."""

import numpy as np
import onnx_ir as ir
import pytest
from forward_graphs import HEADS, N_LAYERS, POOL, forward_graph, step_feeds
from pass_graphs import ops, run

from dsc.passes.graph_edit import add_initializer
from dsc.passes.pass_order import default_pipeline, shared_passes, why_not_cuda_native
from dsc.passes.pipeline import run_pipeline


def lowered(kernels):
    model = forward_graph()
    run_pipeline(model, default_pipeline(kernels, max_positions=POOL))
    return model


@pytest.mark.parametrize(("past", "seq"), [(0, 4), (7, 1), (7, 5)])
def test_both_cuda_graphs_give_the_model_s_logits_and_rows(past, seq):
    full = step_feeds(past, seq)
    expected = run(lowered("ort"), full)
    half = step_feeds(past, seq, np.float16)
    native = run(lowered("cuda_native"), half)
    half.pop("past_lengths")
    half |= {"last_rows": np.array([past + seq - 1], np.int32), "total_length": np.array(past + seq, np.int32)}
    for results in (native, run(lowered("cuda"), half)):
        assert results["logits"].dtype == np.float32
        for name, array in expected.items():
            np.testing.assert_allclose(results[name].astype(np.float32), array, atol=0.06, err_msg=name)


def test_the_native_graph_keeps_its_attention_with_a_body_and_reads_the_past_on_the_device():
    model = lowered("cuda_native")
    assert ops(model).count("VerifyAttention") == N_LAYERS
    assert [name for _, name, _ in model.functions] == ["VerifyAttention"]
    names = [value.name for value in model.graph.inputs]
    assert "past_lengths" in names
    assert "total_length" not in names


def with_sinks(kernels):
    model = forward_graph()
    for node in [node for node in model.graph if node.op_type == "VerifyAttention"]:
        sinks = np.linspace(-1, 2, HEADS, dtype=np.float32)
        node.resize_inputs(7)
        node.replace_input_with(6, add_initializer(model.graph, "sinks", sinks))
    run_pipeline(model, default_pipeline(kernels, max_positions=POOL))
    return model


def test_sinks_stay_float32_in_a_native_graph_and_its_body_takes_them():
    full, half = step_feeds(0, 4), step_feeds(0, 4, np.float16)
    native = with_sinks("cuda_native")
    (sinks,) = [value for value in native.graph.initializers.values() if "sinks" in str(value.name)]
    assert sinks.dtype == ir.DataType.FLOAT
    wanted, without = run(with_sinks("ort"), full)["logits"], run(lowered("ort"), full)["logits"]
    np.testing.assert_allclose(run(native, half)["logits"], wanted, atol=0.03)
    assert np.abs(wanted - without).max() > 0.1


def test_packed_rows_and_mixed_soft_caps_have_no_kernel_inside_a_graph():
    model = forward_graph()
    run_pipeline(model, shared_passes("fp32"))
    assert why_not_cuda_native(model) == ""
    nodes = [node for node in model.graph if node.op_type == "VerifyAttention"]
    nodes[0].attributes["softcap"] = ir.AttrFloat32("softcap", 20.0)
    assert "soft cap" in why_not_cuda_native(model)
    nodes[1].attributes["softcap"] = ir.AttrFloat32("softcap", 20.0)
    assert why_not_cuda_native(model) == ""
    nodes[0].resize_inputs(9)
    for index in (6, 7):
        nodes[0].replace_input_with(index, nodes[0].inputs[0])
    assert why_not_cuda_native(model) == ""
    nodes[0].replace_input_with(8, nodes[0].inputs[0])
    assert "packed rows" in why_not_cuda_native(model)
