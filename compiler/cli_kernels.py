"""`dsc kernels`: the GPU kernels and what they cost."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dsc.bundle_schema.errors import RequestError
from dsc.compiler.console import ReportedFailure, parse_number, print_fields, print_json, print_table

_ARCH = "sm_90"

Arch = Annotated[str, typer.Option(help="build target, e.g. sm_90")]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]
Traceback = Annotated[bool, typer.Option("--traceback", help="errors with their traceback")]

kernels = typer.Typer(help="List the GPU kernels, show or time them.", invoke_without_command=True)


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `dsc` application."""
    app.add_typer(kernels, name="kernels")


@kernels.callback()
def list_command(
    context: typer.Context,
    arch: Arch = _ARCH,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """List the GPU kernels, show or time them."""
    if context.invoked_subcommand is not None:
        if arch != _ARCH or as_json:
            option = "--json" if as_json else "--arch"
            raise RequestError(
                option, f"is not for `dsc kernels {context.invoked_subcommand}`", "give it behind the command"
            )
        return
    from dsc.compiler.kernel_sheet import list_kernels

    lines = list_kernels(arch)
    if as_json:
        print_json([asdict(line) for line in lines])
        return
    rows = [(line.kernel, line.meaning, len(line.variants)) for line in lines]
    print_table(f"kernels on {arch}", ("kernel", "what it does", "variants"), rows)


@kernels.command("list")
def bundle_command(
    bundle: Annotated[Path, typer.Argument(help="a .dsmodel file")],
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """List the kernels that lie in a bundle, with what they take and need."""
    from dsc.compiler.bundle_kernels import kernel_rows

    rows = kernel_rows(bundle)
    if as_json:
        print_json(rows)
    elif rows:
        print_table(str(bundle), tuple(rows[0]), [tuple("-" if x is None else x for x in row.values()) for row in rows])
    else:
        print("no GPU kernels in this bundle")


@kernels.command("show")
def show_command(
    name: Annotated[str, typer.Argument(help="of a kernel or a variant")],
    arch: Arch = _ARCH,
    axis: Annotated[list[str] | None, typer.Option(help="name=size, e.g. batch=8")] = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Print resources, occupancy, bytes moved and the roofline time of one kernel, compiled here."""
    from dsc.compiler.kernel_sheet import show_kernel

    sheet = show_kernel(name, arch, _axes(axis or []))
    record = sheet.record
    fields: dict[str, object] = {
        "variant": record.variant,
        "arch": record.arch,
        "image": f"{record.image}, sha256 {record.sha256[:16]}",
        "made by": f"triton {record.triton_version}"
        + (f", assembler {record.assembler_version}" if record.assembler_version else ""),
        "least driver": _driver(record.minimum_driver),
        "warps, stages": f"{record.num_warps}, {record.num_stages}",
        **({} if record.resources is None else record.resources.model_dump()),
        "dynamic shared memory": record.shared,
        "instructions": ", ".join(f"{name} {count}" for name, count in record.opcodes.items()) or "-",
        **({} if sheet.occupancy is None else {"occupancy": _occupancy(asdict(sheet.occupancy))}),
        "axes": ", ".join(f"{name} {size}" for name, size in sheet.axes.items()),
        "bytes moved": sheet.nbytes,
        "FLOP": sheet.flops,
        f"roofline on {sheet.card}": f"{sheet.roofline_us:.2f} us, bound by {sheet.bound} (computed, not measured)",
    }
    if as_json:
        print_json(fields)
    else:
        print_fields(name, fields)


@kernels.command("bench")
def bench_command(
    out: Annotated[Path, typer.Option(help="folder for the table, the plot and the JSON")] = Path("build/kernels"),
    repeats: Annotated[int, typer.Option(min=5, help="interleaved runs of each case")] = 7,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Time every kernel on this machine's GPU against torch, and judge its results; exit 1 where one is wrong."""
    from dsc.compiler.kernel_bench import bench, copy_bandwidth, cuda_clock, open_device, standard_cases, write_report

    device = open_device()
    _require_folder(out)
    lines = bench(device, standard_cases(), cuda_clock, repeats=repeats)
    files = write_report(out, device.driver.device, copy_bandwidth(cuda_clock), lines)
    if as_json:
        print_json([asdict(line) for line in lines])
    else:
        rows = [(x.name, x.problem or "agrees", *(f"{v:.2f}" for v in (x.us, x.torch_us, x.ratio))) for x in lines]
        print_table(f"kernels on {device.driver.device.name}", ("case", "result", "us", "torch us", "ratio"), rows)
        print_fields("written", {path.name: str(path) for path in files})
    if wrong := [line.name for line in lines if line.problem]:
        raise ReportedFailure(
            "dsc kernels bench", f"{len(wrong)} results differ from the reference: {', '.join(wrong)}"
        )


def _require_folder(path: Path) -> None:
    """Make the folder before anything is timed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError("--out", f"a folder is required, {path} cannot be made: {error.strerror}") from error


def _driver(version: int) -> str:
    return f"CUDA {version // 1000}.{version % 1000 // 10}" if version else "-"


def _occupancy(found: dict[str, object]) -> str:
    return f"{found['blocks']} blocks, {found['warps']} warps ({found['share']:.0%}), limited by {found['limit']}"


def _axes(texts: list[str]) -> dict[str, int]:
    axes = {}
    for text in texts:
        name, _, digits = text.partition("=")
        size = parse_number(digits)
        if size is None:
            raise RequestError("--axis", f"name=size is required, got {text[:80]!r}")
        if name in axes:
            raise RequestError(f"--axis {name}", "one size is required, got several")
        axes[name] = size
    return axes
