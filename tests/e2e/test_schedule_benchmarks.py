"""The scripts that measure what the scheduler saves and how well it is predicted: that they do so, and say it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import predict
import rollback


def test_every_policy_is_predicted_from_every_trace(tiny_bundle: Path, tmp_path: Path) -> None:
    recorder = predict.Recorder(tiny_bundle, tmp_path, 12)
    for turn, text in enumerate(("the cat sat on the cat", "a dog ran")):
        recorder.run(recorder.encode(text), turn)
    assert recorder.same
    text, near, of = predict.tables(tiny_bundle, recorder)
    n_policies = len(predict.POLICIES)
    assert of == n_policies**2
    assert 0 <= near <= of
    assert text.count("\n| fixed:4 | ") == 2
    assert all(speed > 0 for speed in recorder.speeds.values())


def test_what_is_kept_changes_no_draft_and_spares_reading(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(tiny_bundle), "--prompts", "1", "--tokens", "24", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["rollback.py", *options])
    rollback.main()
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(rollback.WINDOWS) * len(rollback.TEMPERATURES)
    kept, again = zip(*(map(int, row[4].split(" / ")) for row in rows[2:]), strict=True)
    assert all(one <= other for one, other in zip(kept, again, strict=True))
    assert "with the index kept" in said
