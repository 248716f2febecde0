"""Every implementation of every operator against the operator's reference, on odd shapes.

Function bodies and native code run in this process, the GPU kernels in Triton's interpreter in another one (Triton
reads its mode when kernels are first imported), and on a GPU where there is one.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from contract_cases import CASES
from implementations import SERVED, rounded, run

from dsc.kernels.table import CONTRACTS, load_contract

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NEUTRAL = {"top_k": (0, np.int32), "top_p": (1, np.float32), "min_p": (0, np.float32)}
RUNS = [
    pytest.param(case, kind, dtype, id=f"{kind}-{case}-{dtype}", marks=[pytest.mark.gpu] if kind == "gpu" else [])
    for case in CASES
    for kind in case.kinds
    if case.contract in SERVED[kind] and (kind == "interpreted") == INTERPRETED
    for dtype in case.dtypes(kind)
]


@pytest.mark.parametrize(("case", "kind", "dtype"), RUNS)
def test_it_agrees_with_the_reference(case, kind, dtype):
    contract = load_contract(case.contract)
    inputs = rounded(contract, case.make(), dtype)
    full = inputs
    if "temperature" in inputs:
        full = {n: np.full(len(inputs["temperature"]), v, t) for n, (v, t) in NEUTRAL.items()} | inputs
    wanted = contract.reference(full, case.attributes)
    found = run(kind, contract, inputs, case.attributes, dtype)
    assert set(found) == set(wanted)
    for name in wanted:
        contract.assert_agrees(name, found[name].astype(wanted[name].dtype), wanted[name], dtype)


@pytest.mark.skipif(INTERPRETED, reason="this is the other process")
def test_gpu_kernels_agree_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is an extra of the compiler")
    pytest.importorskip("torch", reason="the interpreter takes torch tensors")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_every_contract_has_an_implementation():
    assert {name for names in SERVED.values() for name in names} == set(CONTRACTS)
