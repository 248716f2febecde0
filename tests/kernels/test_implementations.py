"""Every implementation of every operator against the operator's reference, on odd shapes.

Function bodies and native code run in this process, the GPU kernels in Triton's interpreter in another one (Triton
reads its mode when kernels are first imported), and on a GPU where there is one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from contract_cases import CASES
from implementations import SERVED, rounded, run

from dsc.kernels.contract import NEUTRAL_FILTERS
from dsc.kernels.speculative_verify import input_names
from dsc.kernels.table import CONTRACTS, load_contract
from dsc.kernels.verify_table import logits_read

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EXACT = "float32"  # the tolerance of types that hold what is moved as it is
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
    wanted = contract.results(inputs, case.attributes)
    found = run(kind, contract, inputs, case.attributes, dtype)
    assert set(found) == set(wanted)
    for name in wanted:
        tolerance = EXACT if dtype == "int8" else dtype
        contract.assert_agrees(name, found[name].astype(wanted[name].dtype), wanted[name], tolerance)


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


def test_the_bytes_of_the_contract_are_one_read_of_the_logits():
    axes = {"B": 8, "K": 4, "R": 5, "V": 152_064, "W": 0}
    assert load_contract("SpeculativeVerify").nbytes(axes) == 4 * logits_read(8, 4, 152_064, "greedy")
    for mode in ("deterministic", "rejection", "block"):
        assert logits_read(8, 4, 152_064, mode) <= 2 * logits_read(8, 4, 152_064, "greedy")


READS = {"B": 2, "K": 3, "R": 4, "V": 9001, "W": 9001}


def loads(mode, names, axes=READS, **changes):
    """How many logits each of the verdict's two launches loads."""
    import torch
    from implementations import interpreter
    from interpreted_kernels import counted_loads

    from dsc.compiler.gpu_operators import bind_operator

    contract = load_contract("SpeculativeVerify")
    made = contract.make_inputs(axes, 0) | changes
    inputs = {name: torch.from_numpy(made[name]) for name in names}
    operation = bind_operator(interpreter(), contract, inputs, {"mode": mode})
    counts = []
    for launch in operation.launches:
        with counted_loads(inputs["logits"]) as found:
            launch.run(0)
        counts.append(sum(found))
    return counts


@pytest.mark.skipif(not INTERPRETED, reason="this is the other process")
@pytest.mark.parametrize(("mode", "proposal"), [("greedy", ""), ("deterministic", "point_mass"), ("block", "dense")])
def test_logits_are_read_once_for_greedy_and_at_most_twice_for_sampling(mode, proposal):
    names = [name for name in input_names(mode) if name not in NEUTRAL_FILTERS]
    lengths = np.full(READS["B"], READS["K"], np.int32)  # all drafts are looked at
    whole = READS["B"] * READS["R"] * READS["V"]
    count = sum(loads(mode, names, draft_lengths=lengths, draft_ids=np.zeros((2, 3), np.int64)))
    most = logits_read(READS["B"], READS["K"], READS["V"], mode, proposal or "point_mass")
    assert count <= most <= (1 if mode == "greedy" else 2) * whole
    assert most - count <= READS["B"] * (READS["K"] + 4096)  # the drafts' own logits, and a last tile that is short


@pytest.mark.skipif(not INTERPRETED, reason="this is the other process")
@pytest.mark.parametrize(
    ("filters", "most"),
    [({"min_p": 0.1}, 2), ({"top_p": 0.9}, 8), ({"top_k": 30}, 9), ({"top_k": 30, "top_p": 0.8}, 14)],
)
def test_a_cut_is_found_in_few_reads_of_a_row(filters, most):
    axes = {"B": 4, "K": 0, "R": 1, "V": 3001, "W": 3001}
    given = {n: np.full(4, filters.get(n, v), t) for n, (v, t) in NEUTRAL_FILTERS.items()}
    logits = 3 * np.random.default_rng(0).standard_normal((4, 1, 3001)).astype(np.float32)
    logits[1, 0, 100:] = -1e9
    logits[2, 0, 100:] = -np.inf
    logits[3] = np.round(logits[3])
    cut, _ = loads("deterministic", input_names("deterministic"), axes, logits=logits, **given)
    assert cut <= 4 * most * 3001


@pytest.mark.skipif(not INTERPRETED, reason="this is the other process")
def test_a_row_of_all_magnitudes_is_cut_in_bounded_reads():
    rng = np.random.default_rng(1)
    logits = (rng.choice([-1, 1], (1, 1, 400)) * 10.0 ** rng.uniform(-38, 30, (1, 1, 400))).astype(np.float32)
    axes = {"B": 1, "K": 0, "R": 1, "V": 400, "W": 400}
    given = {"top_k": np.array([200], np.int32), "top_p": np.ones(1, np.float32), "min_p": np.zeros(1, np.float32)}
    cut, _ = loads("deterministic", input_names("deterministic"), axes, logits=logits, **given)
    assert cut <= 20 * 400


@pytest.mark.skipif(not INTERPRETED, reason="this is the other process")
def test_the_bench_finds_right_kernels_right():
    from implementations import interpreter

    from dsc.compiler.kernel_bench import bench, standard_cases

    small = {"B": 2, "Hq": 4, "Hkv": 1, "M": 150, "V": 301, "W": 301}
    cases = [
        replace(case, axes={name: min(size, small.get(name, size)) for name, size in case.axes.items()})
        for case in standard_cases()
    ]
    lines = bench(interpreter(), cases, lambda run, count: 1.0, device="cpu")
    assert [(line.name, line.problem) for line in lines if line.problem] == []
