"""`dsc passes`, `kernels`, `doctor` and `check-tokenizers`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsc.compiler.console import ReportedFailure, ReportedHostError, print_fields, print_json, print_table

AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]
Traceback = Annotated[bool, typer.Option("--traceback", help="errors with their traceback")]


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `dsc` application."""
    app.command("passes")(passes_command)
    app.command("doctor")(doctor_command)
    app.command("check-tokenizers")(check_tokenizers_command)


def passes_command(as_json: AsJson = False, traceback: Traceback = False) -> None:
    """List the graph passes, what each does, and the default pipelines."""
    from dsc.compiler.pass_list import describe_passes, describe_pipelines

    rows, pipelines = describe_passes(), describe_pipelines()
    if as_json:
        print_json({"passes": rows, "pipelines": pipelines})
        return
    print_table("passes", ("name", "options", "what it does"), [tuple(row.values()) for row in rows])
    print("default pipelines, by kernels and precision, as `--passes` takes them\n")
    for row in pipelines:
        print(f"{row['kernels']}, {row['precision']}: {row['passes']}\n")


def doctor_command(as_json: AsJson = False, traceback: Traceback = False) -> None:
    """Say what this installation can do and what is missing. Exit code 3 when it cannot run a bundle."""
    from dsc.compiler.doctor import examine

    report = examine()
    if as_json:
        print_json(report)
    else:
        print_fields("installation", report["fields"])
        for problem in report["problems"]:
            print(f"problem: {problem}")
    if report["problems"]:
        raise ReportedHostError("doctor", f"{len(report['problems'])} problems found", "each is named above")


def check_tokenizers_command(
    draft: Annotated[Path, typer.Argument(help="HF directory, GGUF file or bundle of the draft")],
    target: Annotated[Path, typer.Argument(help="HF directory, GGUF file or bundle of the target")],
    text: Annotated[str, typer.Option(help="compare on this text as well")] = "Hello, world!",
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Compare two tokenizers by what they do. Exit code 1 when they cannot be paired."""
    from dsc.compiler.pair_report import compare_tokenizers

    report = compare_tokenizers(draft, target, text)
    if as_json:
        print_json(report)
    else:
        print_fields("verdict", report["verdict"])
        print_table("differing tokens", ("id", "draft", "target"), report["differences"])
        print_table("on the text", ("text", "draft id", "target id"), report["on_text"])
    if not report["compatible"]:
        raise ReportedFailure(str(draft), f"cannot draft for {target}: {report['reason']}")
