"""`dsc inspect`, `check`, `plan`, `diff`, `set` and `schema`: what one can ask of a bundle file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsc.bundle_schema.errors import RequestError
from dsc.compiler.console import ReportedFailure, format_nbytes, print_fields, print_json, print_report, print_table

Bundle = Annotated[Path, typer.Argument(help="a .dsmodel file")]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]
Traceback = Annotated[bool, typer.Option("--traceback", help="errors with their traceback")]


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `dsc` application."""
    app.command("inspect")(inspect_command)
    app.command("check")(check_command)
    app.command("plan")(plan_command)
    app.command("diff")(diff_command)
    app.command("set")(set_command)
    app.command("schema")(schema_command)


def inspect_command(
    bundle: Bundle,
    section: Annotated[str | None, typer.Option(help="print one section only")] = None,
    graph: Annotated[str | None, typer.Option(help="target or draft: write its graph as .onnx")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="where --graph writes")] = None,
    device: Annotated[str | None, typer.Option(help="what would run on it: sm_90, a device's number, or none")] = None,
    driver: Annotated[str | None, typer.Option(help="CUDA version of the driver of --device sm_.., e.g. 12.4")] = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Say what a bundle is, what it needs and what it will do."""
    from dsc.compiler.bundle_tools import extract_graph
    from dsc.compiler.inspect import inspect_bundle, select_section

    _require_one({"--section": section, "--graph": graph, "--device": device})
    if output is not None and graph is None:
        raise RequestError("--output", "goes with --graph")
    if driver is not None and device is None:
        raise RequestError("--driver", "goes with --device")
    if graph is not None:
        path = extract_graph(bundle, graph, output)
        nbytes = path.stat().st_size
        if as_json:
            print_json({"graph": str(path), "nbytes": nbytes, "weights": str(bundle)})
        else:
            print(f"wrote {path} ({format_nbytes(nbytes)}; its weights stay in {bundle.name})")
        return
    if device is not None:
        from dsc.compiler.bundle_kernels import device_report

        print_report(device_report(bundle, device, driver), as_json)
        return
    report = inspect_bundle(bundle)
    if section is not None:
        report = select_section(report, section)
    print_report(report, as_json)


def _require_one(options: dict[str, str | None]) -> None:
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise RequestError(given[1], f"goes without {given[0]}", "each is an output of its own")


def check_command(bundle: Bundle, as_json: AsJson = False, traceback: Traceback = False) -> None:
    """Verify every hash, the plan and the certificate. Exit code 1 when the verdict is no."""
    from dsc.compiler.bundle_tools import check_bundle

    result = check_bundle(bundle)
    if as_json:
        print_json(result)
    else:
        rows = [(name, "ok" if item["ok"] else "FAILED", item["detail"]) for name, item in result["checks"].items()]
        print_table(str(bundle), ("check", "verdict", "detail"), rows)
    failed = [name for name, item in result["checks"].items() if not item["ok"]]
    if failed:
        raise ReportedFailure(str(bundle), f"{len(failed)} checks failed: {', '.join(failed)}")


def plan_command(
    bundle: Bundle,
    max_length: Annotated[int | None, typer.Option(help="plan for this many positions")] = None,
    slots: Annotated[int | None, typer.Option(help="plan for this many sequences")] = None,
    memory_gib: Annotated[float | None, typer.Option("--memory", help="does it fit in so many GiB")] = None,
    picture: Annotated[Path | None, typer.Option(help="write the layout as .png or .svg")] = None,
    backend: Annotated[str, typer.Option(help="cpu or cuda: whose graphs use the memory")] = "cpu",
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Show the KV memory layout, whether it fits, and how long a context fits."""
    from dsc.compiler.plan_report import draw_plan, plan_report

    report, plan = plan_report(bundle, max_length, slots, memory_gib, backend)
    if picture is not None:
        draw_plan(plan, picture)
        report["picture"] = str(picture)
    if as_json:
        print_json(report)
    else:
        print_fields("KV plan", {key: value for key, value in report.items() if key != "slots"})
        columns = ("owner", "layer", "role", "dtype", "shape", "offset", "bytes")
        print_table("slots", columns, [[slot[column] for column in columns] for slot in report["slots"]])
    if report.get("fits") is False:
        raise ReportedFailure(
            str(bundle),
            f"needs {format_nbytes(report['total_nbytes'])}, got {memory_gib} GiB",
            f"at most {report['longest_max_length']} positions fit",
        )


def diff_command(
    first: Bundle,
    second: Annotated[Path, typer.Argument(help="the bundle to compare with")],
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Compare two bundles: fields of the manifest, members, weights. Exit code 1 when they differ."""
    from dsc.compiler.bundle_tools import diff_bundles

    rows = diff_bundles(first, second)
    if as_json:
        print_json([dict(zip(("where", "first", "second"), row, strict=True)) for row in rows])
    elif rows:
        print_table("differences", ("where", str(first), str(second)), rows)
    else:
        print("the bundles are equal")
    if rows:
        raise ReportedFailure(str(first), f"differs from {second} in {len(rows)} places")


def set_command(
    bundle: Bundle,
    assignments: Annotated[list[str], typer.Argument(help="key=value of dflash_config.json")],
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Change the DFlash configuration inside a bundle and seal it again."""
    from dsc.compiler.bundle_tools import set_config

    changed, notes = set_config(bundle, assignments)
    report = {"bundle": str(bundle), "changed": changed}
    if as_json:
        print_json({**report, "notes": notes})
        return
    print_report(report, as_json)
    for note in notes:
        print(f"note: {note}")


def schema_command(
    name: Annotated[str | None, typer.Argument(help="manifest, kv_plan, dflash_config or certificate")] = None,
) -> None:
    """Print the JSON Schema of a member."""
    from dsc.bundle_schema.schemas import SCHEMAS, schema_text

    if name is None:
        print("\n".join(sorted(SCHEMAS)))
        return
    if name not in SCHEMAS:
        raise RequestError("schema", f"one of {', '.join(sorted(SCHEMAS))} is required, got {name!r}")
    print(schema_text(name), end="")
