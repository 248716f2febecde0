"""The gate on models whose faults are known: it must find them, count them, and say so in the certificate."""

from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from scripted_lm import reference_logits, scripted_lm
from toy_bundle import toy_info, write_bundle

from dsc.bundle_schema.dflash_config import MAX_WINDOW
from dsc.compiler import gate_costs
from dsc.compiler.gate import run_gate
from dsc.compiler.gate_checks import Reference
from dsc.compiler.request import GateOptions

VOCAB = 40
TABLE = np.random.default_rng(3).normal(size=(VOCAB, VOCAB)).astype(np.float32)
STRICT = GateOptions(n_prompts=2, n_tokens=24, n_draws=200)
LENIENT = STRICT.model_copy(update={"strict": False})


def gate(path, target, options=STRICT, reference=None, exact_weights=False):
    info = toy_info(VOCAB, max_length=256)
    draft = scripted_lm(TABLE, position_ids=False)
    write_bundle(path, target, info, draft=draft, draft_info=info, draft_kind="self")
    return run_gate(path, options, 4, reference, None, exact_weights, threads=1)


def rows_disagree():
    """A model whose logits in a block of rows are not those of the same rows alone, as with unlucky kernels."""
    model = scripted_lm(TABLE)
    state = next(node for node in model.graph.node if node.output[0] == "raw_state")
    state.output[0] = "state_alone"
    at = list(model.graph.node).index(state) + 1
    for node in (
        onnx.helper.make_node("Add", ["state_alone", "in_a_block"], ["raw_state"]),
        onnx.helper.make_node("Cast", ["is_a_block"], ["in_a_block"], to=onnx.TensorProto.INT64),
        onnx.helper.make_node("Greater", ["n_new_scalar", "one"], ["is_a_block"]),
    ):
        model.graph.node.insert(at, node)
    return model


def test_a_sound_model_passes_and_its_costs_are_measured(tmp_path):
    result = gate(tmp_path / "toy.dsmodel", scripted_lm(TABLE))
    certificate = result.certificate
    assert (certificate.verdict, certificate.reasons) == ("pass", ())
    assert {(check.proposer, check.window) for check in certificate.greedy} == {
        (proposer, window) for proposer in ("ngram", "self") for window in (4, 8)
    }
    assert all(check.n_tokens == 2 * 24 and not check.mismatches for check in certificate.greedy)
    drafted = [check for check in certificate.greedy if check.proposer == "self"]
    assert all(check.n_held == check.n_judged > 0 for check in drafted)  # draft and target are the same here
    assert certificate.rows.bit_equal
    assert len(certificate.sampling) == 2
    short, long = result.costs
    assert short.context < long.context == 256 - MAX_WINDOW
    for curve in result.costs:
        assert len(curve.verify_ms) == len(curve.draft_ms["self"]) == MAX_WINDOW
        assert 0 < curve.read_ms["self"] < curve.draft_ms["self"][0]


@pytest.mark.parametrize(("options", "verdict"), [(STRICT, "fail"), (LENIENT, "not_strict")])
def test_rows_that_disagree_in_blocks_are_found_and_placed(tmp_path, options, verdict):
    certificate = gate(tmp_path / "toy.dsmodel", rows_disagree(), options).certificate
    assert certificate.verdict == verdict
    assert "greedy output with self, window 4, differs in 2 of 2 sequences" in certificate.reasons
    assert not certificate.rows.bit_equal
    assert 0 < certificate.rows.n_argmax_changes <= certificate.rows.n_rows
    assert certificate.rows.max_difference > 0
    for check in certificate.greedy:
        for mismatch in check.mismatches:
            assert mismatch.plain != mismatch.speculative
            assert 0 <= mismatch.position < 24
            assert mismatch.logit_gap > 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_model_with_logits_that_are_no_numbers_does_not_pass(tmp_path, bad):
    table = TABLE.copy()
    table[:, 7] = bad
    certificate = gate(tmp_path / "toy.dsmodel", scripted_lm(table)).certificate
    assert certificate.verdict == "fail"
    assert certificate.finite.n_not_finite > 0
    assert f"{certificate.finite.n_not_finite} logits are not finite" in certificate.reasons


def test_logits_are_compared_with_the_framework_where_the_weights_are_exact(tmp_path):
    ids = tuple(int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 50))
    logits = np.stack([reference_logits(TABLE, list(ids[: n + 1])) for n in range(len(ids))])
    right, wrong = (Reference("by hand", ids, values) for values in (logits, np.roll(logits, 1, axis=1)))

    certificate = gate(tmp_path / "a.dsmodel", scripted_lm(TABLE), STRICT, right, exact_weights=True).certificate
    assert certificate.verdict == "pass"
    assert (certificate.parity.n_positions, certificate.parity.n_argmax_equal) == (50, 50)
    assert certificate.parity.max_difference == 0

    certificate = gate(tmp_path / "b.dsmodel", scripted_lm(TABLE), STRICT, wrong, exact_weights=True).certificate
    assert certificate.verdict == "fail"
    assert "logits differ from by hand by" in certificate.reasons[0]
    assert certificate.parity.max_difference > 1


def test_rounded_weights_must_still_be_the_same_model(tmp_path):
    """Where the weights are not the framework's own, noise is allowed and another model is not."""
    ids = tuple(int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 50))
    logits = np.stack([reference_logits(TABLE, list(ids[: n + 1])) for n in range(len(ids))])
    noise = np.random.default_rng(1).normal(size=logits.shape).astype(np.float32)
    near, other = (Reference("by hand", ids, values) for values in (logits + 0.2 * noise, np.roll(logits, 1, axis=1)))

    certificate = gate(tmp_path / "a.dsmodel", scripted_lm(TABLE), STRICT, near).certificate
    assert certificate.verdict == "pass"
    assert 0.95 < certificate.parity.correlation < 1
    assert certificate.parity.max_difference > 1e-3 * certificate.parity.logit_range

    certificate = gate(tmp_path / "b.dsmodel", scripted_lm(TABLE), STRICT, other).certificate
    assert certificate.verdict == "fail"
    assert "logits correlate with those of by hand by" in certificate.reasons[0]


def test_a_machine_that_is_slow_now_and_then_does_not_change_the_ratios_of_costs(monkeypatch):
    now, calls = 0.0, 0

    class Timed:
        zone = SimpleNamespace(least=0)
        reads = True

        def __init__(self, ms):
            self.ms, self.length = ms, 0

        def rewind(self, length):
            self.length = length

        def read(self, ids):
            self.take(0.5 * len(ids))
            self.length += len(ids)

        def forward(self, rows, n_logits):
            self.take(self.ms + len(rows))

        def take(self, ms):
            nonlocal now, calls
            calls += 1
            now += ms / 1e3 * (1 + calls // 23 % 2)  # 23 calls at full speed, 23 at half

    monkeypatch.setattr(gate_costs, "time", SimpleNamespace(perf_counter=lambda: now))
    entry = SimpleNamespace(info=SimpleNamespace(vocab_size=50))
    target, draft = Timed(9.0), Timed(2.0)
    manifest = SimpleNamespace(draft=SimpleNamespace(model=entry))
    model = SimpleNamespace(bundle=SimpleNamespace(target=target, draft=draft, manifest=manifest))
    times = gate_costs._measured(model, list(range(40)), gate_costs.SIZES)
    step = times.ms(1)
    assert [times.ms(rows) / step for rows in gate_costs.SIZES] == pytest.approx(
        [(9 + rows) / 10 for rows in gate_costs.SIZES]
    )
    assert times.ms("draft") / step == pytest.approx(0.3)
    assert times.ms("read") / step == pytest.approx(0.05)
    assert (target.length, draft.length) == (40, 40)
