"""`VerifyAttention` inside a CUDA graph: what the library launches, executed by the interpreter, against the reference.

onnxruntime's CUDA provider runs over a stub whose memory is the host's, so an argument that is passed wrongly, or a row
that is copied to the wrong place, changes the result.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from contract_cases import CASES
from stub_cuda.build import PROVIDER, WHY_NOT, environment

from dsc.kernels.cuda_op import find_cuda_op

pytest.importorskip("triton", reason="Triton is an extra of the compiler")
pytest.importorskip("torch", reason="the interpreter takes torch tensors")

WORKER = Path(__file__).parents[1] / "support" / "stub_cuda" / "operator_worker.py"
LABELS = [case.label for case in CASES if case.contract == "VerifyAttention" and "interpreted" in case.kinds]
PIECES = {"70 rows with sinks": 3, "33 rows behind a window, 80 wide": 2, "40 rows cut into parts": 2}
ONE_LAUNCH_ONLY = ["33 rows of two sequences", "33 rows of a tree"]

pytestmark = [
    pytest.mark.skipif(not PROVIDER.is_file(), reason=WHY_NOT),
    pytest.mark.skipif(find_cuda_op().path is None, reason=f"needs the library: {find_cuda_op().reason}"),
]


@pytest.fixture(scope="module")
def results(stubs):
    """Case -> what it came to."""
    done = subprocess.run(
        [sys.executable, "-P", WORKER], text=True, capture_output=True, check=False,
        env=environment(stubs) | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def kernels(result):
    return ["join" if name.startswith("verify_join") else "tiled" for name in result["launches"]]


@pytest.mark.parametrize("label", LABELS)
def test_one_launch_serves_every_optional_input(results, label):
    result = results[label]
    assert result["problem"] == ""
    assert kernels(result) == (["tiled", "join"] if label.startswith("cut into parts") else ["tiled"])
    assert result["copies"] == []


@pytest.mark.parametrize("label", PIECES)
def test_more_rows_than_a_launch_takes_are_served_in_pieces(results, label):
    result = results[label]
    assert result["problem"] == ""
    n_pieces = PIECES[label]
    assert kernels(result) == (["tiled", "join"] if "parts" in label else ["tiled"]) * n_pieces
    kinds = [" ".join(event.split()[:2]) if event.startswith("copy") else "set" for event in result["copies"]]
    assert kinds == ["set", *["copy device_to_device"] * 4] * n_pieces


@pytest.mark.parametrize("label", ONE_LAUNCH_ONLY)
def test_what_cannot_be_cut_is_refused(results, label):
    result = results[label]
    assert "at most 32 new rows a call of several sequences or of a tree" in result["problem"]
    assert result["launches"] == []
