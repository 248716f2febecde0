"""`dsc run` and `dsc bench`: generate with a bundle, and time it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dsc.bundle_schema.errors import RequestError
from dsc.compiler.console import ReportedFailure, parse_number, print_json, print_table

if TYPE_CHECKING:
    from dsc.runtime.speculator import SpeculationRequest

Bundle = Annotated[Path, typer.Argument(help="a .dsmodel file")]
Chat = Annotated[bool, typer.Option("--chat/--raw", help="use the model's chat template")]
Threads = Annotated[int | None, typer.Option(help="default: the allowed CPUs")]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]
Traceback = Annotated[bool, typer.Option("--traceback", help="errors with their traceback")]

_COLUMNS = (
    "category",
    "plain tok/s",
    "spec tok/s",
    "ratio",
    "tokens/round",
    "accepted",
    "plain TTFT ms",
    "plain p50",
    "plain p99",
    "TTFT ms",
    "p50",
    "p99",
    "same ids",
)


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `dsc` application."""
    app.command("run")(run_command)
    app.command("bench")(bench_command)


def run_command(
    bundle: Bundle,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="default: standard input")] = None,
    chat: Chat = True,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off")] = 0.0,
    seed: Annotated[int, typer.Option()] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="stop string")] = None,
    speculation: Annotated[str, typer.Option(help="auto, off, or a window 1 to 16")] = "auto",
    max_length: Annotated[int | None, typer.Option(help="reserve the cache for so many positions")] = None,
    threads: Threads = None,
    provider: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    kernels: Annotated[Literal["auto", "native", "ort"], typer.Option(help="CPU kernels")] = "auto",
    trace: Annotated[Path | None, typer.Option(help="file to which every round is added as a JSON line")] = None,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="print statistics to stderr")] = True,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Generate text with a bundle."""
    from dsc.runtime import load

    text = _standard_input() if prompt is None else prompt
    if not text:
        raise RequestError("--prompt", "a prompt is required, got an empty one")
    model = load(bundle, provider=provider, threads=threads, max_length=max_length, kernels=kernels)
    stream = model.stream(
        [{"role": "user", "content": text}] if chat else text,
        max_new_tokens=max_new_tokens,
        sampling={"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed},
        stop=stop or [],
        speculation=speculation_option(speculation),
        trace=trace,
    )
    for piece in stream:
        if not as_json:
            print(piece.text, end="", flush=True)
    result = stream.finish()
    if as_json:
        print_json(
            {
                "text": result.text,
                "ids": list(result.ids),
                "finish_reason": result.finish_reason,
                "stats": result.stats.to_dict(),
            }
        )
        return
    print()
    if stats:
        print(result.stats.pretty(), file=sys.stderr)


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError("standard input", f"text in {error.encoding} is required: {error}") from None


def speculation_option(text: str) -> SpeculationRequest:
    """`auto`, `off`, or a fixed window.

    Raises:
        RequestError: anything else.
    """
    if text == "auto":
        return "auto"
    if text == "off":
        return "off"
    window = parse_number(text)
    if window is not None and 1 <= window <= 16:
        return {"window": window}
    raise RequestError("--speculation", f"auto, off or a window 1 to 16 is required, got {text!r}")


def bench_command(
    bundle: Bundle,
    prompts: Annotated[Path | None, typer.Option(help="text file, one prompt a line")] = None,
    chat: Chat = True,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n")] = 96,
    rounds: Annotated[int, typer.Option(help="runs of each setting, in turn")] = 5,
    threads: Threads = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Time speculation against the same bundle with speculation off, in turn; exit code 1 when outputs differ."""
    from dsc.compiler.bench import bench_bundle

    report = bench_bundle(bundle, prompts, max_new_tokens, rounds, threads, chat)
    if as_json:
        print_json(report)
    else:
        print_table(f"{bundle} ({report['threads']} threads, median of {rounds})", _COLUMNS, report["rows"])
    if differ := [row[0] for row in report["rows"] if row[-1] != "yes"]:
        raise ReportedFailure(str(bundle), f"speculation changed the output of {', '.join(differ)}")
