"""`dsc kernels bench` as far as a machine without a GPU goes: baselines, harness, report, refusal."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is an extra of the compiler")
pytest.importorskip("torch", reason="torch is an extra of the compiler")

from contract_cases import CASES
from implementations import GPU, bound
from launch_records import mock_image, record
from typer.testing import CliRunner

from dsc.bundle_schema.errors import CheckFailed, HostError, RequestError
from dsc.compiler import kernel_bench
from dsc.compiler.cli import app
from dsc.compiler.kernel_bench import (
    BenchLine,
    architecture_for,
    bench,
    case_nbytes,
    copy_bandwidth,
    make_inputs,
    standard_cases,
    write_report,
)
from dsc.kernels.gpu_targets import ARCHITECTURES
from dsc.kernels.kernel_table import all_variants
from dsc.kernels.launch_record import KernelArg
from dsc.kernels.table import load_contract
from dsc.runtime.cuda_driver import CudaDriver
from dsc.runtime.device_kernels import DeviceKernels
from dsc.runtime.kernel_choice import CudaDevice

DEVICE = CudaDevice("Mock GPU", (9, 0), 132, 232_448, 12_090)
SMALL = {"B": 2, "Hq": 8, "Hkv": 2, "M": 150, "V": 301, "W": 301}


def small(case):
    """The same case at a size for a CPU."""
    axes = {name: min(size, SMALL.get(name, size)) for name, size in case.axes.items()}
    return kernel_bench.BenchCase(
        case.name, case.contract, axes, case.inputs, case.baseline, case.attributes, "float32"
    )


def clock(run, count):
    begin = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - begin) / count


@pytest.fixture
def kernels(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("gcc, which builds the mock driver, is not installed")
    library = tmp_path / "libmockcuda.so"
    source = Path(__file__).parents[1] / "support" / "mock_cuda.c"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    records = {}
    for variant in all_variants("sm_90"):
        args = tuple(KernelArg(name=name, type=kind) for name, kind in variant.signature)
        records[variant.name] = record(
            kernel=variant.kernel, variant=variant.name, entry=variant.function, args=args, grid=variant.grid,
            divisible_by_16=variant.divisible_by_16, equals=variant.equals, at_most=variant.at_most,
            num_warps=variant.num_warps,
        )  # fmt: skip
    with CudaDriver(library=str(library)) as driver:
        yield DeviceKernels(driver, records, lambda member: mock_image(records[member]))


@pytest.mark.parametrize("case", [small(case) for case in standard_cases()], ids=lambda case: case.name)
def test_the_baseline_computes_what_the_contract_says(case):
    arrays, tensors = make_inputs(case, "cpu")
    contract = load_contract(case.contract)
    wanted = contract.results(arrays, case.attributes)
    found = case.baseline(tensors, case.attributes)()
    if case.contract == "SpeculativeVerify":
        accepted, token = found
        np.testing.assert_array_equal(accepted.flatten().numpy(), wanted["n_accepted"])
        np.testing.assert_array_equal(token.flatten().numpy(), wanted["next_token"])
    elif case.contract == "KvCommit":
        np.testing.assert_array_equal(found.numpy(), wanted["pool_out"])
    elif case.contract == "VerifyAttention":
        contract.assert_agrees("o", found.numpy(), wanted["o"])
    else:  # the new rows are seen before they are rounded
        np.testing.assert_allclose(found.numpy(), wanted["o"], atol=0.05)


def test_the_cases_for_a_gpu_launch_every_declared_variant(kernels):
    """What `make test-gpu` judges leaves none out; here a driver that computes nothing takes each launch."""
    launched = set()
    for case in CASES:
        for dtype in case.dtypes("gpu") if "gpu" in case.kinds and case.contract in GPU else ():
            contract, inputs = load_contract(case.contract), case.make()
            operation = bound(kernels, "cpu", contract, inputs, case.attributes, dtype)
            operation.run()
            launched |= {launch.prepared.record.variant for launch in operation.launches}
    assert launched == {variant.name for variant in all_variants("sm_90")}


def test_a_driver_that_computes_nothing_is_found_out_and_timed(kernels, tmp_path):
    cases = [replace(small(case), dtype="float16") for case in standard_cases()]
    lines = bench(kernels, cases, clock, device="cpu", repeats=5)
    assert [line.name for line in lines] == [case.name for case in cases]
    assert all("is required" in line.problem or "is allowed" in line.problem for line in lines)
    assert all(line.us > 0 and line.torch_us > 0 and line.ratio > 0 for line in lines)
    bandwidth = copy_bandwidth(clock, "cpu", 1 << 16)
    data, table, plot = write_report(tmp_path / "out", DEVICE, bandwidth, lines)
    assert json.loads(data.read_text())["lines"][0]["name"] == cases[0].name
    assert table.read_text().count("\n| ") == len(cases) + 1
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_kernel_that_agrees_has_no_problem(tmp_path):
    (data, table, _) = write_report(tmp_path, DEVICE, 3e12, [BenchLine("x", "", 2.0, 4.0, 2.0, 1500.0)])
    assert "| x | agrees | 2.0 | 4.0 | 2.00 | 1500 | 50% |" in table.read_text()
    assert json.loads(data.read_text())["device"]["capability"] == [9, 0]


def test_bytes_are_those_of_the_contract_in_the_measured_type():
    cases = {case.name: case for case in standard_cases()}
    attention = cases["attention, 8 x 8192, 5 rows, head 128"]
    rows = 8 * 5 * 128
    assert case_nbytes(attention) == 2 * (2 * 8 * 8 * (8192 + 5) * 128 + 2 * 32 * rows + 4 * 8 * rows)
    assert case_nbytes(cases["verdict greedy, 8 x 152064"]) == 4 * 8 * (5 * 152_064)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 7), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90"), ((10, 3), "compute_80")],
)
def test_a_device_gets_the_image_that_runs_on_it(capability, arch):
    assert architecture_for(CudaDevice("x", capability, 1, 1, 1)) == arch
    assert arch in ARCHITECTURES


def test_too_few_repeats_are_refused(kernels):
    with pytest.raises(RequestError, match="--repeats: at least 5 are required, got 3"):
        bench(kernels, (), clock, repeats=3)


def test_without_a_gpu_it_says_so(monkeypatch):
    def no_driver(*_):
        raise HostError("libcuda.so.1", "the CUDA driver library cannot be loaded")

    monkeypatch.setattr("dsc.runtime.cuda_driver.CudaDriver", no_driver)
    with pytest.raises(HostError, match=r"dsc kernels bench: a CUDA GPU is required.*dsc kernels show works without"):
        kernel_bench.open_device()


@pytest.mark.parametrize(
    ("warning", "why"), [("the driver is too old", "the driver is too old"), ("", "it finds none")]
)
def test_without_a_torch_that_has_cuda_it_says_why(monkeypatch, warning, why):
    def unavailable():
        if warning:
            warnings.warn(f"{warning} (Triggered internally at x.cpp:1.)", UserWarning, stacklevel=1)
        return False

    monkeypatch.setattr("dsc.runtime.cuda_driver.CudaDriver", lambda: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr("torch.cuda.is_available", unavailable)
    with pytest.raises(HostError, match=rf"^pytest --gpu: CUDA is required of torch [\w.+]+: {why} \(make gpu; update"):
        kernel_bench.require_gpu("pytest --gpu")


def test_the_command_writes_its_report_and_fails_where_a_result_is_wrong(kernels, tmp_path, monkeypatch):
    patches = {
        "open_device": lambda: kernels,
        "standard_cases": lambda: tuple(map(small, standard_cases()))[-1:],
        "bench": lambda *given, **options: [BenchLine("commit", "row 3 differs", 2.0, 4.0, 2.0, 1500.0)],
        "copy_bandwidth": lambda clock: 3e12,
    }
    for name, value in patches.items():
        monkeypatch.setattr(kernel_bench, name, value)
    done = CliRunner().invoke(app, ["kernels", "bench", "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, CheckFailed)
    assert "1 results differ from the reference: commit" in str(done.exception)
    assert "row 3 differs" in (tmp_path / "out" / "kernels.md").read_text()
    assert CliRunner().invoke(app, ["kernels", "bench", "--repeats", "4"]).exit_code == 2
