"""Every example runs, on a tiny model, and prints what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: object) -> str:
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_by_a_test():
    tested = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'run("{path.name}"' not in tested] == []


def test_demo(tiny_source, tmp_path):
    first = run("demo.py", tiny_source, tmp_path)
    assert first.count("output identical: yes") == 2
    assert "seal" in first
    second = run("demo.py", tiny_source, tmp_path)
    assert "compiling" not in second
    assert second.count("output identical: yes") == 2


def test_stream_and_ban(tiny_bundle):
    assert "found again [], as plain decoding: True" in run("stream_and_ban.py", tiny_bundle)


def test_write_a_pass(tiny_source):
    text = run("write_a_pass.py", tiny_source)
    assert "rename-nodes: fired" in text
    assert "VerifyAttention" in text
