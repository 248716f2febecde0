"""`dsc kernels bench`: the compiled kernels on this machine's GPU against torch: right first, then how fast."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dsc.bundle_schema.errors import HostError, KernelError, RequestError
from dsc.compiler import kernel_baselines as baselines
from dsc.compiler.console import save_picture
from dsc.compiler.gpu_operators import bind_operator
from dsc.kernels.aot import compile_kernels, default_cache
from dsc.kernels.bundle_members import kernel_entry
from dsc.kernels.gpu_targets import ARCHITECTURES
from dsc.kernels.kernel_table import all_variants
from dsc.kernels.table import load_contract
from dsc.runtime.device_kernels import DeviceKernels
from dsc.runtime.kernel_choice import CudaDevice

if TYPE_CHECKING:
    import torch

Baseline = Callable[[Mapping[str, Any], Mapping[str, Any]], Callable[[], object]]
_FLOAT32 = 4
_TIMED_S = 2e-2


@dataclass(frozen=True)
class BenchCase:
    """An operator at one size.

    Attributes:
        inputs: those of the contract's inputs that it has; lengths and paths are as long as can be.
        baseline: given tensors and attributes, what to time against.
        dtype: of the contract's float tensors.
    """

    name: str
    contract: str
    axes: Mapping[str, int]
    inputs: tuple[str, ...]
    baseline: Baseline
    attributes: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float16"


@dataclass(frozen=True)
class BenchLine:
    """What was found; `ratio` is torch's time by ours in interleaved runs, `problem` is empty where results agree."""

    name: str
    problem: str
    us: float
    torch_us: float
    ratio: float
    gb_per_s: float


class Clock(Protocol):
    """Seconds that one of `count` runs takes."""

    def __call__(self, run: Callable[[], object], count: int) -> float:
        """Time them together, after one that is not timed."""


def _attention(rows: int, size: int, batch: int, length: int, contract: str = "VerifyAttention") -> BenchCase:
    axes = {"B": batch, "Hq": 32, "Hkv": 8, "S": rows, "D": size, "M": length + rows}
    quantised = contract == "VerifyAttentionInt8"
    names = ("q", "k", "v", "k_pool", "v_pool", "past_lengths", *(("k_scales", "v_scales") if quantised else ()))
    return BenchCase(
        f"attention{' int8' if quantised else ''}, {batch} x {length}, {rows} rows, head {size}",
        contract,
        axes,
        names,
        baselines.attention_int8 if quantised else baselines.attention,
    )


def _verdict(mode: str, batch: int, vocab: int) -> BenchCase:
    names: tuple[str, ...] = ("logits", "draft_ids", "draft_lengths")
    if mode != "greedy":
        names += ("uniforms", "temperature", "q")
    axes = {"B": batch, "K": 4, "R": 5, "V": vocab, "W": vocab}
    run = baselines.greedy_verdict if mode == "greedy" else baselines.rejection_verdict
    return BenchCase(f"verdict {mode}, {batch} x {vocab}", "SpeculativeVerify", axes, names, run, {"mode": mode})


def standard_cases() -> tuple[BenchCase, ...]:
    """What `dsc kernels bench` measures: 8 sequences of 8k tokens, a vocabulary of 152k, an accepted path."""
    pool = ("pool", "past_lengths", "path", "counts")
    return (
        *(_attention(rows, 128, 8, 8192) for rows in (1, 5, 8)),
        *(_attention(5, size, 8, 8192) for size in (64, 96, 256)),
        _attention(5, 128, 1, 8192),
        _attention(5, 128, 8, 8192, "VerifyAttentionInt8"),
        *(_verdict(mode, batch, 152_064) for mode in ("greedy", "rejection") for batch in (1, 8)),
        BenchCase("commit", "KvCommit", {"B": 8, "Hkv": 8, "M": 4096, "D": 128, "P": 8}, pool, baselines.commit),
    )


def require_gpu(where: str) -> None:
    """Refuse to go on where nothing can be measured.

    Raises:
        HostError: there is no usable CUDA driver and device, or torch has no CUDA.
    """
    import torch

    from dsc.runtime.cuda_driver import CudaDriver

    try:
        CudaDriver().close()
    except HostError as error:
        hint = "dsc kernels show works without one"
        raise HostError(where, f"a CUDA GPU is required: {error.what}", hint) from error
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        why = str(said[0].message).partition(" (Triggered")[0] if said else "it finds none"
        raise HostError(where, f"CUDA is required of torch {torch.__version__}: {why}", "make gpu; update the driver")


def open_device() -> DeviceKernels:
    """Every declared kernel on the first GPU; compiled where the user's cache has it not.

    Raises:
        HostError: there is no GPU, torch has no CUDA, or Triton is missing.
    """
    require_gpu("dsc kernels bench")
    import torch

    from dsc.runtime.cuda_driver import CudaDriver

    torch.cuda.init()
    driver = CudaDriver()
    arch = architecture_for(driver.device)
    made = compile_kernels(all_variants(arch), arch, cache=default_cache(), workers=os.cpu_count() or 1)
    code = {kernel_entry(kernel).member: kernel for kernel in made}
    return DeviceKernels(driver, {member: k.record for member, k in code.items()}, lambda member: code[member].code)


def architecture_for(device: CudaDevice) -> str:
    """The build target whose image a device runs best: its own, else an older minor's, else PTX."""
    major, minor = device.capability
    own = [target for target in ARCHITECTURES.values() if target.image == "cubin" and target.capability]
    for target in sorted(own, key=lambda target: target.capability or (0, 0), reverse=True):
        has = target.capability or (0, 0)
        if has == (major, minor) or (has[0] == major and has[1] < minor and not target.exact):
            return target.name
    return "compute_80"


def cuda_clock(run: Callable[[], object], count: int) -> float:
    """Seconds by the device's own events around `count` queued runs."""
    import torch

    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


def copy_bandwidth(clock: Clock, device: str = "cuda", nbytes: int = 1 << 30) -> float:
    """Bytes/s, read and written, of a plain copy: what a kernel that is bound by memory can hope for."""
    import torch

    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / median(clock(lambda: target.copy_(source), 10) for _ in range(5))


def bench(
    kernels: DeviceKernels, cases: Iterable[BenchCase], clock: Clock, device: str = "cuda", repeats: int = 7
) -> tuple[BenchLine, ...]:
    """Judge and time each case; runs of kernel and baseline alternate, figures are medians.

    Raises:
        KernelError: no kernel serves a case.
        RequestError: fewer than five repeats.
    """
    if repeats < 5:
        raise RequestError("--repeats", f"at least 5 are required, got {repeats}")
    return tuple(_bench_case(kernels, case, clock, device, repeats) for case in cases)


def make_inputs(case: BenchCase, device: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(NumPy inputs for the reference, the same as tensors): values as the tensors' types hold them."""
    import torch

    contract = load_contract(case.contract)
    made = _longest_inputs(case)
    floats = {role.name for role in contract.inputs if role.kind == "float"}
    tensors = {name: torch.from_numpy(array).to(device) for name, array in made.items()}
    tensors = {n: t.to(getattr(torch, case.dtype)) if n in floats else t for n, t in tensors.items()}
    return {name: widened(tensor) for name, tensor in tensors.items()}, tensors


def _longest_inputs(case: BenchCase) -> dict[str, Any]:
    """A case's inputs with lengths and paths as long as can be."""
    made = {n: array for n, array in load_contract(case.contract).make_inputs(case.axes, 0).items() if n in case.inputs}
    if "past_lengths" in made:
        room = case.axes["S"] if "S" in case.axes else 2 * case.axes["P"]
        made["past_lengths"] = np.full(case.axes["B"], case.axes["M"] - room, np.int32)
    if "temperature" in made:  # few tokens have all the mass: among 152,064 alike ones rounding would choose
        made["temperature"] = np.full(case.axes["B"], 0.1, np.float32)
    if "counts" in made:
        made["counts"] = np.full(case.axes["B"], case.axes["P"], np.int32)
        made["path"] = np.tile(np.arange(case.axes["P"], dtype=np.int32) * 2, (case.axes["B"], 1))
    if "draft_lengths" in made:
        made["draft_lengths"] = np.full(case.axes["B"], case.axes["K"], np.int32)
        made["draft_ids"] = np.minimum(made["draft_ids"], case.axes["V"] - 1)
    return made


def widened(tensor: torch.Tensor) -> Any:
    """A tensor as a NumPy array, floats in float32."""
    return (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()


def case_nbytes(case: BenchCase) -> int:
    """The bytes that the contract says must move."""
    contract = load_contract(case.contract)
    axes = case.axes if "W" not in case.axes or "q" in case.inputs else {**case.axes, "W": 0}
    width = _FLOAT32 if all(role.kind != "float" for role in contract.inputs) else 2
    scaled = any(role.kind == "pool" for role in contract.inputs)  # its contract counts 16-bit rows itself
    return contract.nbytes(axes) if scaled else contract.nbytes(axes) * width // _FLOAT32


def _bench_case(kernels: DeviceKernels, case: BenchCase, clock: Clock, device: str, repeats: int) -> BenchLine:
    arrays, tensors = make_inputs(case, device)
    operation = bind_operator(kernels, load_contract(case.contract), tensors, case.attributes)
    stream = _stream(device)
    operation.run(stream)
    _wait(device)
    problem = _problem(case, arrays, {name: widened(tensor) for name, tensor in operation.outputs.items()})
    baseline = case.baseline(tensors, case.attributes)
    slower = max(clock(lambda: operation.run(stream), 1), clock(baseline, 1))
    count = max(2, min(100, int(_TIMED_S / max(slower, 1e-6))))
    times = [(clock(lambda: operation.run(stream), count), clock(baseline, count)) for _ in range(repeats)]
    ours, theirs = (median(column) for column in zip(*times, strict=True))
    ratio = median(torch_time / time for time, torch_time in times)
    return BenchLine(case.name, problem, ours * 1e6, theirs * 1e6, ratio, case_nbytes(case) / ours / 1e9)


def _problem(case: BenchCase, arrays: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    contract = load_contract(case.contract)
    wanted = contract.results(arrays, case.attributes)
    try:
        for name, value in wanted.items():
            contract.assert_agrees(name, found[name].astype(value.dtype), value, case.dtype)
    except KernelError as error:
        return str(error)
    return ""


def _stream(device: str) -> int:
    import torch

    return int(torch.cuda.current_stream().cuda_stream) if device == "cuda" else 0


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def write_report(folder: Path, device: CudaDevice, bandwidth: float, lines: Sequence[BenchLine]) -> tuple[Path, ...]:
    """Write ``kernels.json``, ``kernels.md`` and ``kernels.png`` into `folder`; returns their paths.

    Raises:
        HostError: they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, table, plot = (folder / f"kernels.{kind}" for kind in ("json", "md", "png"))
    facts = {"device": asdict(device), "copy_gb_per_s": bandwidth / 1e9, "lines": [asdict(line) for line in lines]}
    rows = [
        f"| {x.name} | {x.problem or 'agrees'} | {x.us:.1f} | {x.torch_us:.1f} | {x.ratio:.2f} | {x.gb_per_s:.0f} "
        f"| {x.gb_per_s * 1e9 / bandwidth:.0%} |"
        for x in lines
    ]
    head = "| case | result | us | torch us | torch / ours | GB/s | of a copy |\n|---|---|---|---|---|---|---|"
    title = f"# Kernels on {device.name}\n\nA copy moves {bandwidth / 1e9:.0f} GB/s. Medians of interleaved runs."
    try:
        data.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        table.write_text("\n".join([title, "", head, *rows, ""]), encoding="utf-8")
        _plot(plot, device, lines)
    except OSError as error:
        raise HostError(str(folder), f"the report cannot be written: {error.strerror}") from error
    return data, table, plot


def _plot(path: Path, device: CudaDevice, lines: Sequence[BenchLine]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(lines) + 1.2), layout="constrained")
    axes.barh([line.name for line in lines], [line.ratio for line in lines], color="#4878a8")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel(f"torch's time by ours, {device.name}")
    save_picture(figure, path)
