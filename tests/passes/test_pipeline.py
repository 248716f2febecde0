from dataclasses import dataclass, field
from typing import ClassVar

import onnx_ir as ir
import pytest
from pass_graphs import text_model

from dsc.bundle_schema.errors import PassError, RequestError
from dsc.passes.base import PROGRAM_ONLY, GraphPass, PassResult, Reason
from dsc.passes.pipeline import load_pass, parse_pipeline, run_pipeline


def model():
    return text_model("agraph (float[B, 4] x) => (float[B, 4] y) { h = Relu(x) y = Neg(h) }")


@dataclass(frozen=True)
class Probe(GraphPass):
    """A pass for these tests."""

    name: ClassVar[str] = "probe"
    size: int = 3
    names: tuple[str, ...] = ()
    table: dict = field(default_factory=dict, metadata=PROGRAM_ONLY)

    def call(self, model):
        return PassResult(1, (Reason("1", "here", "because"),))


@dataclass(frozen=True)
class Breaks(GraphPass):
    """A pass that leaves a wrong shape."""

    name: ClassVar[str] = "breaks"

    def call(self, model):
        model.graph.outputs[0].shape = ir.Shape(["B", 5])
        return PassResult(1)


@dataclass(frozen=True)
class Crashes(GraphPass):
    """A pass with a bug."""

    name: ClassVar[str] = "crashes"

    def call(self, model):
        raise ZeroDivisionError("bug")


@dataclass(frozen=True)
class Demands(GraphPass):
    """A pass whose precondition fails."""

    name: ClassVar[str] = "demands"

    def call(self, model):
        raise AssertionError("never reached")

    def requires(self, model):
        raise PassError("node 'x'", "required a thing, got none")


def test_every_pass_is_timed_verified_and_shown():
    seen = []
    report = run_pipeline(model(), [Probe(), Probe(size=4)], lambda p, m, r: seen.append((p, len(m.graph), r)))
    assert [run.spec for run in report.runs] == ["probe", "probe{size=4}"]
    assert report.modified
    assert all(run.seconds >= 0 and run.verify_seconds > 0 and run.fired == 1 for run in report.runs)
    assert report.seconds >= sum(run.seconds for run in report.runs)
    assert [entry[2] for entry in seen] == list(report.runs)
    assert str(report.runs[0].skipped[0]) == "rule 1 at here: because"


def test_a_broken_graph_names_the_pass_and_those_before():
    with pytest.raises(PassError, match=r"pass breaks: .*already run: probe\{size=4\}") as caught:
        run_pipeline(model(), [Probe(size=4), Breaks(), Probe()])
    assert caught.value.where == "pass breaks"


def test_a_refusal_names_the_pass_and_keeps_the_reason():
    with pytest.raises(PassError, match=r"pass demands: node 'x': required a thing, got none.*already run: none"):
        run_pipeline(model(), [Demands()])


def test_a_bug_keeps_its_type_and_is_told_where_it_happened():
    with pytest.raises(ZeroDivisionError) as caught:
        run_pipeline(model(), [Probe(), Crashes()])
    assert caught.value.__notes__ == ["in pass crashes; passes already run: probe"]


def test_text_and_back():
    text = "fold-constants{max_elements=16},eliminate-common-subexpressions"
    passes = parse_pipeline(text)
    assert ",".join(map(str, passes)) == text
    assert parse_pipeline("") == ()
    assert str(Probe(names=("a", "b"))) == "probe{names=a|b}"
    spaced = parse_pipeline(" lower-attention{ fold_rotary=true, max_positions=64 } , fold-constants")
    assert [str(p) for p in spaced] == [
        "lower-attention{fold_rotary=true,max_positions=64}",
        "fold-constants",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no-such-pass", "no such pass.*known: .*fold-constants"),
        ("fold-constants{", "required name"),
        ("fold-constants{}}", "required name"),
        ("fold-constants;x", "required name"),
        ("fold-constants{size=1}", "options: max_elements"),
        ("fold-constants{max_elements}", "required option=value"),
        ("fold-constants{max_elements=many}", "option max_elements: .*got 'many'"),
        ("lower-attention{fold_rotary=maybe}", "fold_rotary"),
        ("quantize-weights{bits=5}", "required one of 4, 8, got '5'"),
        ("quantize-weights{block_weights=x}", "options: accuracy_level, bits"),
    ],
)
def test_bad_text_says_what_is_known(text, message):
    with pytest.raises(RequestError, match=message):
        parse_pipeline(text)


def test_load_pass():
    assert load_pass("fold-constants").name == "fold-constants"
