"""Tail graphs: bare onnxruntime opens them and every window runs through the same session."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from dsc.bundle_schema.errors import KernelError
from dsc.kernels.speculative_verify import SPECULATIVE_VERIFY, input_names
from dsc.kernels.tail_graphs import greedy_tail, sampled_tail

FORMS = [
    ("greedy", False),
    ("deterministic", False),
    ("rejection", False),
    ("rejection", True),
    ("block", False),
    ("block", True),
]
TAILS = [(*form, penalties) for form in FORMS for penalties in (False, True)]


def tail(mode: str, sparse: bool, penalties: bool) -> ir.Model:
    return greedy_tail(penalties) if mode == "greedy" else sampled_tail(mode, sparse, penalties)


@pytest.mark.parametrize(("mode", "sparse", "penalties"), TAILS)
def test_bare_onnxruntime_runs_every_window_with_one_session(mode, sparse, penalties):
    proto = ir.to_proto(tail(mode, sparse, penalties))
    onnx.checker.check_model(proto)
    assert proto.ir_version == 10
    assert {entry.domain: entry.version for entry in proto.opset_import} == {"": 23, "ai.dspark": 1}
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert tuple(value.name for value in session.get_inputs()) == input_names(mode, sparse, penalties)
    for b, k in ((1, 0), (1, 4), (3, 2)):
        axes = {"B": b, "K": k, "R": k + 1, "V": 33, "W": 9 if sparse else 33} | ({"H": 7 * k} if penalties else {})
        inputs = SPECULATIVE_VERIFY.make_inputs(axes, seed=b + k)
        wanted = SPECULATIVE_VERIFY.reference(inputs, {"mode": mode})
        found = session.run(list(wanted), {name: inputs[name] for name in input_names(mode, sparse, penalties)})
        for (name, array), value in zip(wanted.items(), found, strict=True):
            SPECULATIVE_VERIFY.assert_agrees(name, value, array)


def test_greedy_never_computes_a_softmax():
    (body,) = greedy_tail().functions.values()
    assert not {"Softmax", "Exp", "LogSoftmax", "TopK"} & {node.op_type for node in body}


def test_dimensions_are_symbolic_and_say_what_they_are():
    inputs = {value.name: value.shape for value in sampled_tail("rejection", sparse=True).graph.inputs}
    assert [str(dim) for dim in inputs["logits"]] == ["batch", "rows", "vocab"]
    assert [str(dim) for dim in inputs["q_ids"]] == ["batch", "drafts", "proposed"]
    dense = {value.name: value.shape for value in sampled_tail("block").graph.inputs}
    assert [str(dim) for dim in dense["q"]] == ["batch", "drafts", "vocab"]


def test_the_same_tail_is_the_same_bytes():
    first, second = (ir.to_proto(sampled_tail("block")).SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


def test_modes_without_a_sampled_tail_are_refused():
    with pytest.raises(KernelError, match="deterministic, rejection, block"):
        sampled_tail("greedy")
    with pytest.raises(KernelError, match="no q"):
        sampled_tail("deterministic", sparse=True)
