"""Runs the interpreter cases in their own process: Triton reads its mode when kernels are first imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is an extra of the compiler")
pytest.importorskip("torch", reason="the interpreter takes torch tensors")


@pytest.mark.parametrize("name", ["interpreted_cases.py", "interpreted_verify_cases.py"])
def test_every_kernel_equals_its_reference_in_the_interpreter(name):
    cases = Path(__file__).with_name(name)
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
