import numpy as np
import pytest
from forward_graphs import forward_graph, step_feeds
from pass_graphs import ops, run

from dsc.bundle_schema.errors import PassError
from dsc.passes.lengths_as_inputs import LengthsAsInputsPass
from dsc.passes.pass_order import default_pipeline
from dsc.passes.pipeline import run_pipeline


def lowered(*more):
    model = forward_graph()
    run_pipeline(model, (*default_pipeline("ort"), *more))
    return model


@pytest.mark.parametrize(("past", "seq"), [(0, 4), (7, 1), (7, 5)])
def test_the_caller_states_what_the_graph_computed_before(past, seq):
    feeds = step_feeds(past, seq)
    before = run(lowered(), feeds)
    feeds.pop("past_lengths")
    feeds |= {"last_rows": np.array([past + seq - 1], np.int32), "total_length": np.array(past + seq, np.int32)}
    after = run(lowered(LengthsAsInputsPass()), feeds)
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)


def test_the_chain_and_the_input_that_it_began_with_go():
    before, after = lowered(), lowered(LengthsAsInputsPass())
    gone = [op for op in ops(before) if op in ("Shape", "Sub", "ReduceMax")]
    assert gone
    assert not [op for op in ops(after) if op in ("Shape", "Sub", "ReduceMax")]
    names = [value.name for value in after.graph.inputs]
    assert names[-2:] == ["last_rows", "total_length"]
    assert "past_lengths" not in names


def test_a_second_time_changes_nothing():
    model = lowered(LengthsAsInputsPass())
    text = str(model.graph)
    assert not LengthsAsInputsPass()(model).modified
    assert str(model.graph) == text


def test_layers_that_read_different_lengths_are_refused():
    model = lowered()
    last = [node for node in model.graph if node.op_type == "GroupQueryAttention"][-1]
    last.replace_input_with(5, model.graph.inputs[3])
    with pytest.raises(PassError, match="every layer must have the same one"):
        LengthsAsInputsPass()(model)
