"""The benchmark of the scheduler: what its tables say of given runs, and which settings it compares."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from pays import PLAIN, Run, Setting, mixed_prompts, settings_for
from pays_report import best_fixed, speeds, verdict, write_report


def run(setting: str, category: str, ms: float, prompt: str = "a", same: bool = True) -> Run:
    return Run("int4", category, prompt, setting, 63, ms, 0.0, same, 20, {"0": 5, "4": 15}, {}, {})


RUNS = [
    *(run("plain", category, ms) for category in ("chat", "edit") for ms in (90.0, 110.0)),
    run("calibrated", "chat", 100.0),
    run("calibrated", "edit", 50.0),
    run("rules", "chat", 125.0),
    run("rules", "edit", 80.0),
    run("ngram:4", "chat", 200.0),
    run("ngram:4", "edit", 40.0),
]


def test_a_setting_is_compared_with_plain_decoding_around_it():
    found = speeds(RUNS)
    assert found["calibrated"] == pytest.approx({"chat": 1.0, "edit": 2.0, "mix": 4 / 3})
    assert found["ngram:4"] == pytest.approx({"chat": 0.5, "edit": 2.5, "mix": 2 / 2.4})
    assert best_fixed(found, "edit") == ("ngram:4", pytest.approx(2.5))
    assert best_fixed(found, "chat") == best_fixed(found, "mix") == ("plain", 1.0)


def test_the_verdict_names_what_was_missed():
    rows = {what: reached for what, _, _, reached in verdict(speeds(RUNS), ["chat", "edit"])}
    assert rows == {
        "chat: calibrated / best fixed (plain)": "yes",
        "chat: calibrated / plain": "yes",
        "edit: calibrated / best fixed (ngram:4)": "no",
        "edit: calibrated / plain": "yes",
        "mix: calibrated / best single fixed (plain)": "yes",
    }


def test_the_report_has_a_table_and_a_chart_and_counts_other_outputs(tmp_path):
    write_report(tmp_path, [*RUNS, run("self:2", "chat", 100.0, same=False)], foreign=0.1)
    text = (tmp_path / "pays.md").read_text()
    assert "1 with another output" in text
    assert "- chat: a\n- edit: a\n" in text
    assert json.loads((tmp_path / "pays.json").read_text())["int4"]["differing"] == 1
    assert (tmp_path / "pays-int4.png").read_bytes().startswith(b"\x89PNG")


def test_the_mix_has_fifty_prompts_and_the_cache_is_asked_only_about_what_it_has_seen():
    prompts = mixed_prompts(10)
    categories = [prompt.category for prompt in prompts]
    assert {name: categories.count(name) for name in categories} == dict.fromkeys(
        ["chat", "edit", "quote", "document", "summary", "repeat"], 10
    )
    offered = ("self", "ngram", "cache")
    fixed = {setting.proposer for setting in settings_for(offered, "chat")}
    assert fixed == {"", "self", "ngram"}
    assert {setting.proposer for setting in settings_for(offered, "repeat")} == {"", "self", "ngram", "cache"}
    assert (PLAIN.speculation, Setting("rules", "rules").speculation) == ("off", "auto")
    assert Setting("ngram:4", "", "ngram", 4).speculation == {"proposer": "ngram", "window": 4, "fallback": False}
