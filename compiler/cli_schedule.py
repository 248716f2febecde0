"""`dsc simulate`: other policies on a recorded trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dsc.compiler.console import print_json, print_table


def register(app: typer.Typer) -> None:
    """Add this module's command to the `dsc` application."""
    app.command("simulate")(simulate_command)


def simulate_command(
    bundle: Annotated[Path, typer.Argument(help="a .dsmodel file")],
    trace: Annotated[Path, typer.Option(help="JSON lines, written by `dsc run --trace` or generate(trace=...)")],
    policy: Annotated[
        str, typer.Option(help="off, fixed, fixed:4, rules, calibrated, batched; separated by commas")
    ] = ("calibrated,rules,fixed:4,off"),
    costs: Annotated[
        Literal["curve", "trace"], typer.Option(help="the bundle's curve, or corrected by the trace's own times")
    ] = "curve",
    plot: Annotated[Path | None, typer.Option(help="picture of tokens/s and windows (.png, .svg)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="errors with their traceback")] = False,
) -> None:
    """Say what other policies would have done on a recorded trace. Runs no model."""
    from dsc.compiler.simulate import draw_simulation, simulate

    report = simulate(bundle, trace, policy, costs)
    if plot is not None:
        draw_simulation(report, plot)
    if as_json:
        print_json(report)
        return
    columns = ("policy", "tok/s", "x plain", "tokens/round", "accepted", "windows", "proposers")
    print_table(
        f"{report['n_requests']} generations, costs of the {costs}",
        columns,
        [
            (
                row["policy"],
                row["tokens_per_second"],
                row["speed"],
                row["tokens_per_round"],
                row["acceptance"],
                _counts(row["windows"]),
                _counts(row["proposers"]),
            )
            for row in report["rows"]
        ],
    )
    recorded = report["recorded"]
    print(
        f"recorded: policy {recorded['policy']}, {recorded['tokens_per_second']:.1f} tokens/s, "
        f"{recorded['tokens_per_round']:.2f} tokens a round"
    )
    for note in report["notes"]:
        print(f"note: {note}")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items()) or "-"
