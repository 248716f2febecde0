"""The benchmark scripts: what they measure is tested elsewhere, that they measure it and say so is tested here."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import prove
import run
from contenders import Contender, dsc_contenders, peer_contenders
from measure import Case, Row, Settings, clean_run, deal, read_rows, run_rounds, write_rows
from peer_worker import LoadMeter
from prompts import all_prompts, by_category
from summary import CATEGORIES, figure, summarise
from workers import WorkerError, worker

ECHO = """
from time import perf_counter, sleep

VERSION = "echo 1"


class Runtime:
    facts = {"weight_bytes": 1, "arena_bytes": 1}

    def generate(self, ids, n_tokens, speculation):
        print("a library that prints to stdout")
        if n_tokens == 13:
            raise ValueError("thirteen tokens")
        sleep(0.01 if speculation is None else 0.005)
        found = [ids[-1]] * n_tokens
        if speculation and speculation.get("wrong"):
            found[-1] += 1
        return {"ids": found, "first_s": 0.001, "total_s": 0.011 if speculation is None else 0.006}


def load(options):
    assert options["threads"] == 2
    return Runtime()
"""


@pytest.fixture
def echo_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime that repeats the prompt's last token; its module is found by the worker script."""
    (tmp_path / "peer_echo.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Path(sys.executable)


def _cases(n_tokens: int = 4) -> list[Case]:
    return [Case(name, f"{name} {i}", (5, 6 + i), n_tokens) for name in CATEGORIES for i in range(3)]


def _settings(**changes: object) -> Settings:
    return replace(Settings(rounds=2, cases_a_round=2, threads=2, foreign=2.0, retries=0), **changes)


def test_there_are_enough_prompts_and_no_two_are_equal() -> None:
    prompts = all_prompts()
    assert len(prompts) >= 100
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert all(len(group) == 10 for group in by_category(10).values())


def test_every_prompt_is_dealt_out_once_before_any_comes_again() -> None:
    cases = _cases()
    dealt = [deal(cases, index, 1) for index in range(4)]
    assert {case.name for turn in dealt[:3] for case in turn} == {case.name for case in cases}
    assert dealt[3] == dealt[0]
    assert len(deal(cases, 0, 99)) == len(cases)


def test_rounds_measure_every_mode_and_leave_out_who_fails(echo_peer: Path, tmp_path: Path) -> None:
    modes = {"plain": None, "fast": {}, "wrong": {"wrong": True}}
    contenders = [
        Contender("echo", "echo", echo_peer, tmp_path, modes=modes),
        Contender("absent", "echo", tmp_path / "no-python", tmp_path),
        Contender("unbuilt", "echo", echo_peer, tmp_path, missing="no model"),
        Contender("echo +", "echo", echo_peer, tmp_path, modes={"lookup": {}}, baseline="echo"),
    ]
    said: list[str] = []
    fixed = [Case("past 64", "fixed", (1,) * 64, 4, plain_only=True)]
    path = tmp_path / "rows.jsonl"
    rows = write_rows(path, run_rounds(contenders, fixed, _cases(), _settings(), said.append))
    assert rows == read_rows(path)
    assert {row.contender: row.detail["reason"] for row in rows if row.category == "skipped"} == {
        "absent": f"there is no {tmp_path / 'no-python'}",
        "unbuilt": "no model",
    }
    assert sum("skipped" in line for line in said) == 2  # once each, not every round
    found = {item.name: item for item in summarise(rows, contenders)}
    assert list(found) == ["echo plain", "echo fast", "echo wrong", "echo + lookup"]
    assert found["echo plain"].rate["chat"].value == pytest.approx(3 / 0.010)
    assert found["echo plain"].rate["past 64"].runs == 2
    assert "past 64" not in found["echo fast"].rate
    assert found["echo plain"].ratio == {}
    assert found["echo fast"].ratio["edit"].value == pytest.approx(2.0)
    assert found["echo + lookup"].ratio["edit"].value == pytest.approx(2.0)
    assert found["echo plain"].by_time == {}
    assert found["echo fast"].by_time["edit and quote"].value == pytest.approx(2.0)
    assert (found["echo fast"].same, found["echo fast"].compared) == (12, 12)
    assert (found["echo wrong"].same, found["echo wrong"].compared) == (0, 12)
    machine = {"CPU": "echo", "memory GB/s": 10.0}
    run.report(tmp_path, machine, rows, contenders)
    assert "| echo fast |" in (tmp_path / "bench.md").read_text()
    assert json.loads((tmp_path / "bench.json").read_text())["skipped"]["unbuilt"] == "no model"
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_runtime_that_fails_says_why(echo_peer: Path) -> None:
    with worker(echo_peer, "echo", {"threads": 2}) as running:
        assert running.generate([7], 2)["ids"] == [7, 7]
        with pytest.raises(WorkerError, match="ValueError: thirteen tokens"):
            running.generate([7], 13)
    with pytest.raises(WorkerError, match="No module named 'peer_nobody'"), worker(echo_peer, "nobody", {"threads": 2}):
        pass


def test_a_disturbed_run_is_repeated_and_the_best_kept_with_a_mark() -> None:
    loads = iter([0.5, 0.2, 0.3])
    answer = {"ids": [1], "first_s": 0.1, "total_s": 0.2, "peak_mb": 1.0}
    running = SimpleNamespace(generate=lambda *_: answer | {"foreign": next(loads)})
    contender = Contender("echo", "echo", Path("python"), Path("model"))
    row = clean_run(running, contender, "plain", _cases()[0], 0, _settings(foreign=0.08, retries=2))
    assert (row.foreign, row.clean) == (0.2, False)
    loads = iter([0.5, 0.07, 0.0])
    row = clean_run(running, contender, "plain", _cases()[0], 0, _settings(foreign=0.08, retries=2))
    assert (row.foreign, row.clean) == (0.07, True)


def test_disturbed_runs_count_only_when_there_are_no_others() -> None:
    row = Row(0, "c", "plain", "chat", "x", 1, [1, 2], 1.0, 2.0, 0.0, True, 1.0)
    slow = replace(row, total_s=11.0, clean=False)
    assert figure([row, slow], lambda one: one.tokens_per_second).value == 1.0
    found = figure([slow, slow], lambda one: one.tokens_per_second)
    assert found.text() == "0.1*"
    assert figure([], lambda one: one.total_s) is None


def test_the_meters_read_this_machine() -> None:
    meter = LoadMeter()
    assert 1e6 < run.read_bandwidth(threads=2, megabytes=8) < 1e13
    assert 0.0 <= meter.share() <= 1.5


def test_the_list_of_contenders_names_a_model_or_the_reason_for_none(tmp_path: Path) -> None:
    found = dsc_contenders({"fp32": tmp_path, "fp32-self": tmp_path})
    found += peer_contenders(tmp_path, tmp_path, tmp_path, {"fp32": tmp_path, "int4": "the builder failed"})
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
    assert all(one.baseline in ("", *names) for one in found)
    assert [one.missing for one in found if one.missing] == ["the builder failed"]


def test_dsc_is_timed_through_its_own_runtime(tiny_bundle: Path) -> None:
    (contender,) = dsc_contenders({"tiny-self": tiny_bundle})
    rows = list(run_rounds([contender], [], _cases(n_tokens=6), _settings(rounds=1), lambda _: None))
    start = rows[0]
    assert start.detail["load_s"] > 0
    assert start.detail["facts"]["weight_bytes"] == tiny_bundle.stat().st_size
    for row in rows[1:]:
        assert len(row.ids) == 6
        assert 0 < row.detail["ort_s"] < row.total_s
        # whether a draft pays beside steps as short as these is for the clock to say
        assert row.detail["stats"]["speculation"] == ("off" if row.mode == "plain" else "self")
        assert row.mode == "self" or row.detail["stats"]["proposed"] == 0
    plain, fast = summarise(rows, [contender])
    assert (plain.compared, fast.same, fast.compared) == (0, 8, 8)


def test_speculation_by_time_counts_every_second(tmp_path: Path, echo_peer: Path) -> None:
    def row(case: str, mode: str, seconds: float) -> Row:
        return Row(0, "echo", mode, "quote", case, 4, [1] * 11, 1.0, 1.0 + seconds, 0.0, True, 1.0, {})

    rows = [row("short", "plain", 1.0), row("short", "fast", 2.0), row("long", "plain", 9.0), row("long", "fast", 3.0)]
    _, fast = summarise(rows, [Contender("echo", "echo", echo_peer, tmp_path, modes={"plain": {}, "fast": {}})])
    assert fast.ratio["quote"].value == pytest.approx(1.75)
    assert fast.by_time["quote"].value == pytest.approx(2.0)


def test_a_proof_holds_resumes_and_is_written(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--bundle", str(tiny_bundle), "--out", str(tmp_path), "--prompts", "3", "--tokens", "8"]
    monkeypatch.setattr(sys, "argv", ["prove.py", *options, "--all-windows", "1"])
    assert prove.main() == 0, capsys.readouterr().err
    record = json.loads((tmp_path / "lossless.json").read_text())
    assert record["failures"] == []
    assert {run["window"] for run in record["runs"]} == set(range(1, 9))
    assert {run["proposer"] for run in record["runs"]} == {"ngram", "self"}
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"key": "cut o')
    monkeypatch.setattr(prove.Prover, "_generate", None)  # nothing is run again
    assert prove.main() == 0
    assert json.loads((tmp_path / "lossless.json").read_text()) == record


def test_a_difference_is_found_with_the_gap_at_its_start(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = prove.Prover._generate

    def wrong(self: prove.Prover, ids: list[int], speculation: object, hooks: tuple[object, ...] = ()) -> object:
        result = generate(self, ids, speculation, hooks)
        if speculation == "off":
            return result
        changed = (*result.ids[:3], (result.ids[3] + 1) % 7, *result.ids[4:])
        return replace(result, ids=changed)

    monkeypatch.setattr(prove.Prover, "_generate", wrong)
    options = ["--bundle", str(tiny_bundle), "--out", str(tmp_path), "--prompts", "1", "--tokens", "6"]
    monkeypatch.setattr(sys, "argv", ["prove.py", *options, "--all-windows", "0"])
    assert prove.main() == 1
    record = json.loads((tmp_path / "lossless.json").read_text())
    for found in record["runs"]:
        assert found["first_difference"] == 3
        assert found["plain_gap"] > 0
        assert found["draft_gap"] == pytest.approx(found["plain_gap"], rel=1e-3)
    assert "1 of 1 sequences differ" in record["failures"][0]
    assert "Each differing sequence" in (tmp_path / "lossless.md").read_text()


def test_a_proposer_that_never_proposed_proves_nothing() -> None:
    idle = prove.Run("k", "b", "ngram", 4, "p", 8, proposed=0, accepted=0, rounds=8)
    assert prove.failures([idle]) == ["b, ngram: never proposed a token, so nothing was proved"]
    assert prove.failures([idle, replace(idle, proposed=1)]) == []


def test_sequences_of_different_lengths_are_an_error() -> None:
    assert prove.first_difference([1, 2], [1, 2]) is None
    assert prove.first_difference([1, 2], [1, 3]) == 1
    with pytest.raises(ValueError, match="2 and 1 tokens"):
        prove.first_difference([1, 2], [1])
