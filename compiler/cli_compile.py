"""`dsc compile`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsc.compiler.console import Progress, is_terminal, print_json, print_report

if TYPE_CHECKING:
    from dsc.compiler.request import CompileRequest

_DRAFT_HELP = "none, ngram, self, or the path of a draft model's checkpoint"


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `dsc` application."""
    app.command("compile")(compile_command)


def compile_command(
    target: Annotated[Path | None, typer.Argument(help="target model: HF directory, GGUF or ONNX file")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the bundle to write")] = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML file; flags override it")] = None,
    name: Annotated[str | None, typer.Option(help="name in the manifest")] = None,
    precision: Annotated[str | None, typer.Option(help="keep, fp32, fp16, int8 or int4")] = None,
    head_precision: Annotated[str | None, typer.Option(help="precision of lm_head")] = None,
    block_size: Annotated[int | None, typer.Option(help="weights a quantisation scale: 32, 64, 128")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="weights left in float, name pattern")] = None,
    draft: Annotated[str | None, typer.Option(help=_DRAFT_HELP)] = None,
    draft_precision: Annotated[str | None, typer.Option(help="precision of the draft's weights")] = None,
    max_length: Annotated[int | None, typer.Option(help="positions; default the model's own")] = None,
    eos_id: Annotated[list[int] | None, typer.Option(help="end token of an ONNX model, may be repeated")] = None,
    slots: Annotated[int | None, typer.Option(help="sequences that share the KV pool")] = None,
    window: Annotated[int | None, typer.Option(help="drafted tokens a round, 1 to 16")] = None,
    kernels: Annotated[str | None, typer.Option(help="native or ort")] = None,
    backend: Annotated[str | None, typer.Option(help="cpu, cuda, rocm, comma-separated; cpu is always in")] = None,
    arch: Annotated[str | None, typer.Option(help="GPU architectures, sm_80,sm_90; default all known")] = None,
    cuda_attention: Annotated[str | None, typer.Option(help="ort; dspark: also by the bundle's own kernels")] = None,
    passes: Annotated[str | None, typer.Option(help="the pass pipeline, a,b{option=1}")] = None,
    dump_after: Annotated[list[str] | None, typer.Option(help="pass name or `all`: write the graph")] = None,
    dump_dir: Annotated[Path | None, typer.Option(help="folder for dumped graphs")] = None,
    time_passes: Annotated[bool, typer.Option("--time-passes", help="seconds of every pass")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="say why a rewrite did not fire")] = False,
    strict: Annotated[
        bool | None, typer.Option("--strict/--no-strict", help="refuse a bundle that fails its gate")
    ] = None,
    gate_prompts: Annotated[int | None, typer.Option(help="calibration prompts of the gate")] = None,
    gate_tokens: Annotated[int | None, typer.Option(help="tokens a calibration prompt")] = None,
    threads: Annotated[int | None, typer.Option(help="default: the allowed CPUs")] = None,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="leave measured times out: same input, same bytes")
    ] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="replace an existing bundle")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be done; write nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable report")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="errors with their traceback")] = False,
) -> None:
    """Compile a target model and its draft into one .dsmodel bundle."""
    given: dict[str, Any] = {
        "target": target,
        "output": output,
        "name": name,
        "weights": {
            "precision": precision,
            "head_precision": head_precision,
            "block_size": block_size,
            "exclude": exclude,
        },
        "draft": {**_draft_options(draft), "precision": draft_precision},
        "max_length": max_length,
        "eos_ids": eos_id,
        "n_slots": slots,
        "window": window,
        "kernels": kernels,
        "backends": backend,
        "archs": arch,
        "cuda_attention": cuda_attention,
        "passes": {"pipeline": passes, "dump_after": dump_after, "dump_dir": dump_dir},
        "gate": {"strict": strict, "n_prompts": gate_prompts, "n_tokens": gate_tokens},
        "threads": threads,
        "reproducible": reproducible or None,
        "force": force or None,
    }
    request = _request(recipe, given)
    if dry_run:
        from dsc.compiler.dry_run import dry_run_report

        print_report(dry_run_report(request), as_json)
        return
    from dsc.compiler.compile import compile_bundle

    with Progress(enabled=is_terminal() and not as_json) as progress:
        report = compile_bundle(request, on_stage=progress.stage)
    if as_json:
        print_json(report.to_dict())
    else:
        report.print(time_passes=time_passes, explain=explain)


def _draft_options(draft: str | None) -> dict[str, Any]:
    """A draft given on the command line is a kind's name or a path."""
    if draft is None:
        return {}
    from dsc.compiler.request import DraftKind

    if draft in set(DraftKind):
        return {"kind": draft}
    return {"kind": "model", "source": draft}


def _request(recipe: Path | None, given: dict[str, Any]) -> CompileRequest:
    from dsc.compiler.request import build_request, load_recipe, merge_options

    base = load_recipe(recipe) if recipe is not None else {}
    if "kind" in given["draft"] and isinstance(base.get("draft"), dict):
        base["draft"] = _kept(base["draft"], given["draft"]["kind"])
    where = str(recipe) if recipe is not None else "dsc compile"
    return build_request(merge_options(base, given), where)


def _kept(draft: dict[str, Any], kind: str) -> dict[str, Any]:
    """What of a recipe's draft holds for another one: lookups have no weights, only a checkpoint states its length."""
    from dsc.compiler.request import DraftKind, DraftOptions

    dropped = {"kind", "source"}
    if kind != DraftKind.MODEL:
        dropped |= {"max_length"}
    if kind in (DraftKind.NONE, DraftKind.NGRAM):
        dropped = set(DraftOptions.model_fields)
    return {key: value for key, value in draft.items() if key not in dropped}
