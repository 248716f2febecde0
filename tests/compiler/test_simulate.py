"""The simulator against real runs of the same policies: windows, acceptance and rounds, token for token."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from toy_bundle import toy_bundle

from dsc.bundle_schema.dflash_config import CalibratedPolicy, CostCurve, DflashConfig, Proposer
from dsc.bundle_schema.errors import RequestError
from dsc.compiler.bundle_tools import set_config
from dsc.compiler.simulate import draw_simulation, parse_policies, simulate
from dsc.compiler.trace_reader import read_trace
from dsc.runtime import load

VOCAB = 13
RNG = np.random.default_rng(3)
TARGET = RNG.normal(size=(VOCAB, VOCAB)).astype(np.float32)
DRAFT = TARGET + 0.5 * RNG.normal(size=TARGET.shape).astype(np.float32)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
CURVE = CostCurve(
    device="toy",
    verify_ms=tuple(10.0 + row for row in range(16)),
    draft_ms={"self": tuple(1.0 * k for k in range(1, 17))},
)


def bundle(folder: Path, draft: bool, policy: str, cache: bool = False) -> Path:
    kinds = ["ngram", *(["self"] if draft else [])]
    table = {kind: Proposer() for kind in kinds} | {"cache": Proposer(enabled=cache)}
    by_curve = CalibratedPolicy(refresh_costs=False)
    config = DflashConfig(policy=policy, costs=(CURVE,), proposers=table, calibrated=by_curve)
    tables = (TARGET, DRAFT) if draft else (TARGET,)
    kind = "self" if draft else "ngram"
    path = folder / f"{policy}.dsmodel"
    return toy_bundle(path, *tables, draft_kind=kind, max_length=256, config=config, history=False)


def record(path: Path, trace: Path, **options) -> list:
    model = load(path, verify="never")
    return [model.generate(prompt, 150, trace=trace, **options).stats for prompt in PROMPTS]


@pytest.mark.parametrize("policy", ["calibrated", "rules", "batched", "fixed:4"])
def test_lookups_are_replayed_exactly_from_a_plain_run(tmp_path, policy):
    name, _, window = policy.partition(":")
    path = bundle(tmp_path, draft=False, policy=name)
    record(path, tmp_path / "plain.jsonl", speculation="off")
    stats = record(path, tmp_path / "real.jsonl", speculation={"window": int(window)} if window else "auto")
    if name == "rules":  # its signals are in a trace of its own
        (tmp_path / "real.jsonl").rename(tmp_path / "plain.jsonl")
    (row,) = simulate(path, tmp_path / "plain.jsonl", policy)["rows"]
    assert row["proposed"] == sum(run.proposed for run in stats)
    assert row["rounds"] == sum(run.rounds for run in stats) - len(PROMPTS)
    windows = sum((run.windows for run in stats), start=type(stats[0].windows)())
    windows[0] -= len(PROMPTS)
    assert row["windows"] == {str(k): n for k, n in sorted(windows.items()) if n}


@pytest.mark.parametrize("policy", ["calibrated", "rules"])
def test_a_recorded_draft_is_replayed_exactly_by_the_policy_that_recorded_it(tmp_path, policy):
    path = bundle(tmp_path, draft=True, policy=policy)
    stats = record(path, tmp_path / "t.jsonl")
    (row,) = simulate(path, tmp_path / "t.jsonl", policy)["rows"]
    assert row["proposed"] == sum(run.proposed for run in stats)
    assert row["proposers"] == {
        kind: sum(run.proposers[kind].rounds for run in stats if kind in run.proposers) for kind in row["proposers"]
    }


def test_another_policys_tokens_a_round_are_predicted_within_ten_percent(tmp_path):
    """The simulator's tokens a round for `calibrated`, from a trace of `fixed:4`, against a real run of it."""
    path = bundle(tmp_path, draft=True, policy="calibrated")
    record(path, tmp_path / "fixed.jsonl", speculation={"window": 4, "fallback": False})
    stats = record(path, tmp_path / "real.jsonl")
    report = simulate(path, tmp_path / "fixed.jsonl", "calibrated,off")
    predicted = report["rows"][0]["tokens_per_round"]
    real = sum(run.emitted - 1 for run in stats) / sum(run.rounds - 1 for run in stats)
    assert predicted == pytest.approx(real, rel=0.1)
    assert report["rows"][1]["speed"] == pytest.approx(1)
    assert report["rows"][1]["tokens_per_second"] == pytest.approx(100)


def test_the_continuation_cache_is_replayed_across_generations(tmp_path):
    path = bundle(tmp_path, draft=False, policy="calibrated", cache=True)
    model = load(path, verify="never")
    stats = [model.generate([3, 1, 4], 100, trace=tmp_path / "t.jsonl").stats for _ in range(2)]
    (row,) = simulate(path, tmp_path / "t.jsonl", "calibrated")["rows"]
    assert row["proposers"]["cache"] == sum(run.proposers["cache"].rounds for run in stats if "cache" in run.proposers)


def test_costs_of_the_trace_follow_its_times(tmp_path):
    path = bundle(tmp_path, draft=False, policy="calibrated")
    trace = tmp_path / "t.jsonl"
    record(path, trace)
    slower = [json.loads(line) for line in trace.read_text().splitlines()]
    for line in slower:
        if line["event"] == "round" and line["ms"].get("forward"):
            line["ms"]["forward"] = 2 * CURVE.verify_ms[len(line["draft_ids"])]
    trace.write_text("".join(json.dumps(line) + "\n" for line in slower))
    (by_curve,) = simulate(path, trace, "calibrated")["rows"]
    (by_trace,) = simulate(path, trace, "calibrated", "trace")["rows"]
    assert by_trace["tokens_per_second"] == pytest.approx(by_curve["tokens_per_second"] / 2)


def test_a_run_is_predicted_exactly_from_its_own_trace_whatever_its_rounds_took(tmp_path):
    """Each count of rows has its own mean, rare ones too, and what is spent outside of the models counts."""
    path = bundle(tmp_path, draft=False, policy="calibrated")
    trace = tmp_path / "t.jsonl"
    record(path, trace)
    rng = np.random.default_rng(1)
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    emitted = total_ms = spent_ms = 0.0
    for line in lines:
        if line["event"] == "round" and "forward" in line["ms"]:
            line["ms"]["forward"] = float(rng.uniform(5, 50))
            spent_ms += line["ms"]["forward"] + 3.5
        elif line["event"] == "end":
            line |= {"first_token_ms": 100.0, "total_ms": 100.0 + spent_ms}
            emitted, total_ms, spent_ms = emitted + line["emitted"] - 1, total_ms + spent_ms, 0.0
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = simulate(path, trace, "calibrated", "trace")["rows"]
    assert len(row["windows"]) > 2
    assert row["tokens_per_second"] == pytest.approx(emitted / total_ms * 1000)


def test_a_draft_that_reads_the_prompt_first_is_counted_once_and_not_as_drafting(tmp_path):
    path = bundle(tmp_path, draft=True, policy="calibrated")
    trace = tmp_path / "t.jsonl"
    load(path, verify="never").generate(PROMPTS[2] * 6, 100, trace=trace)

    def seconds(reading_ms: float) -> float:
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        for line in lines:
            if line["event"] == "round":
                rows = len(line["draft_ids"])
                spent = CURVE.draft_ms["self"][rows - 1] if line["proposer"] == "self" else 0.0
                line["ms"] |= {"propose": spent + (reading_ms if line["lag"] > 16 else 0.0)}
                if "forward" in line["ms"]:
                    line["ms"]["forward"] = CURVE.verify_ms[rows]
        changed = tmp_path / "changed.jsonl"
        changed.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (row,) = simulate(path, changed, "calibrated", "trace")["rows"]
        return 99 / row["tokens_per_second"]

    assert seconds(500.0) - seconds(0.0) == pytest.approx(0.5, rel=0.05)


def test_the_plot_is_drawn_and_a_bad_ending_is_named(tmp_path):
    path = bundle(tmp_path, draft=False, policy="calibrated")
    record(path, tmp_path / "t.jsonl")
    report = simulate(path, tmp_path / "t.jsonl", "calibrated,off")
    draw_simulation(report, tmp_path / "p.svg")
    assert "<svg" in (tmp_path / "p.svg").read_text()
    with pytest.raises(RequestError, match="picture format"):
        draw_simulation(report, tmp_path / "p.nonsense")


@pytest.mark.parametrize("text", ["", "fast", "fixed:0", "fixed:17", "calibrated,"])
def test_a_policy_that_is_none_is_named(text):
    with pytest.raises(RequestError, match="--policy"):
        parse_policies(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[1:], "begins with a request"),
        (lambda lines: [], "at least one generation"),
        (lambda lines: [*lines, "{"], "a JSON object is required"),
        (lambda lines: [lines[0].replace('"1.2"', '"2.0"'), *lines[1:]], "schema 1.2 is required"),
        (lambda lines: [lines[0], *lines[2:]], "a round at 5 tokens is required, got one at 6"),
        (lambda lines: [lines[0], lines[1].replace('"accepted":0', '"accepted":9'), *lines[2:]], "cannot have been"),
        (lambda lines: [lines[0].replace('"prompt_ids"', '"prompt"'), *lines[1:]], "prompt_ids"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path, change, message):
    path = bundle(tmp_path, draft=False, policy="fixed")
    trace = tmp_path / "t.jsonl"
    load(path, verify="never").generate(PROMPTS[0], 20, trace=trace)
    trace.write_text("\n".join(change(trace.read_text().splitlines())))
    with pytest.raises(RequestError, match=message):
        read_trace(trace)


def test_a_trace_of_another_model_is_refused_with_both_names(tmp_path):
    path = bundle(tmp_path, draft=False, policy="fixed")
    trace = tmp_path / "t.jsonl"
    load(path, verify="never").generate(PROMPTS[0], 20, trace=trace)
    other = toy_bundle(tmp_path / "other.dsmodel", DRAFT, max_length=256, history=False)
    with pytest.raises(RequestError, match=r"a recording of 'toy' \(\w{12}\) is required, got one of 'toy' \(\w{12}\)"):
        simulate(other, trace, "off")
    set_config(path, ["policy=calibrated"])  # another schedule is what a simulation is for
    assert simulate(path, trace, "off")["n_requests"] == 1


def test_a_trace_that_breaks_off_counts_as_far_as_it_goes(tmp_path):
    path = bundle(tmp_path, draft=False, policy="fixed")
    trace = tmp_path / "t.jsonl"
    load(path, verify="never").generate(PROMPTS[0], 20, trace=trace)
    trace.write_text("\n".join(trace.read_text().splitlines()[:4]))
    (request,) = read_trace(trace)
    assert len(request.tokens) > len(PROMPTS[0])


def test_a_compiled_bundle_is_scheduled_by_its_curve_and_its_trace_simulated(tiny_bundle, tmp_path):
    trace, picture = tmp_path / "t.jsonl", tmp_path / "windows.svg"
    command = ["run", tiny_bundle, "--raw", "-p", "the cat sat on the cat", "-n", "24", "--json", "--trace", trace]
    stats = json.loads(dsc(0, *command).stdout)["stats"]
    assert (stats["policy"], stats["speculation"]) == ("calibrated", "self+ngram")
    assert stats["costs"] == "measured on this device"
    command = ["simulate", tiny_bundle, "--trace", trace, "--policy", "calibrated,off", "--plot", picture]
    report = json.loads(dsc(0, *command, "--json").stdout)
    assert [row["policy"] for row in report["rows"]] == ["calibrated", "off"]
    assert "<svg" in picture.read_text()
    assert "calibrated" in dsc(0, *command).stdout
    assert "--policy" in dsc(2, "simulate", tiny_bundle, "--trace", trace, "--policy", "magic").stderr
    assert "cannot be read" in dsc(2, "simulate", tiny_bundle, "--trace", tmp_path / "nothing").stderr


def dsc(code: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("dsc"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done
