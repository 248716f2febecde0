"""What can be said of a bundle without running it: inspect, check, diff, set, extract a graph."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dsc.bundle_schema.certificate import CERTIFICATE_NAME, parse_certificate
from dsc.bundle_schema.container import open_bundle, relocate_graph, rewrite_members
from dsc.bundle_schema.dflash_config import DFLASH_CONFIG_NAME, apply_override, dump_config, parse_config
from dsc.bundle_schema.errors import DscError, RequestError
from dsc.bundle_schema.kv_plan import KV_PLAN_NAME, check_plan, parse_plan
from dsc.bundle_schema.manifest import GraphEntry, Manifest, ModelEntry
from dsc.compiler.console import format_nbytes
from dsc.compiler.plan_kv import kv_nbytes_per_token


def inspect_bundle(path: Path) -> dict[str, Any]:
    """Every section that `dsc inspect` prints, as JSON-able data. Reads only the small members."""
    with open_bundle(path) as bundle:
        manifest = bundle.manifest
        plan = parse_plan(bundle.read(KV_PLAN_NAME))
        config = parse_config(bundle.read(DFLASH_CONFIG_NAME))
        certificate = parse_certificate(bundle.read(CERTIFICATE_NAME))
        total = len(bundle.map)
    target = manifest.target.info
    sections: dict[str, Any] = {
        "identity": {
            "name": manifest.name,
            "file": str(path),
            "size": f"{format_nbytes(total)} ({total} bytes)",
            "schema": manifest.schema_version,
            "draft": manifest.draft.kind,
            "verdict": certificate.verdict,
        },
        "provenance": {
            **{f"made by {tool}": version for tool, version in manifest.created_by.items()},
            **{f"source of {part}": text for part, text in manifest.sources.items()},
            **{f"licence of {part}": text for part, text in manifest.licences.items()},
        },
        "needs": {
            "onnxruntime": f">= {manifest.requires.min_onnxruntime}",
            "IR version": manifest.requires.ir_version,
            "opsets": _join(manifest.requires.opsets),
            "KV memory": format_nbytes(plan.total_nbytes),
        },
        "target": _model_section(manifest.target),
    }
    if manifest.draft.model is not None:
        sections["draft"] = _model_section(manifest.draft.model)
    for graph in manifest.graphs():
        sections[f"graph {graph.member}"] = _graph_section(graph)
    sections["parameters"] = _parameters_section(manifest)
    sections["kv_plan"] = {
        "positions": plan.max_length,
        "slots": plan.n_slots,
        "rollback slack": plan.rollback_slack,
        "rows a layer": plan.slots[0].rows if plan.slots else 0,
        "bytes per token": kv_nbytes_per_token(target),
        "bytes at maximum length": format_nbytes(plan.total_nbytes),
        "zones": ", ".join(f"{zone.name} {format_nbytes(zone.nbytes)}" for zone in plan.zones),
    }
    sections["schedule"] = {
        "policy": config.policy,
        "windows": f"{config.windows.min}..{config.windows.max}, first {config.windows.default}",
        "proposers": ", ".join(sorted(config.proposers)) or "none",
        "fall-back": f"at most {config.fallback.max_overhead:.0%} slower than plain decoding",
        **{f"verify ms on {curve.device}": _curve(curve.verify_ms) for curve in config.costs},
    }
    sections["tokenizer"] = {
        "files": ", ".join(manifest.tokenizer.members) or "none: token ids only",
        "verdict": manifest.tokenizer.verdict,
        "summary": manifest.tokenizer.summary,
    }
    sections["kernels"] = {f"{kernel.name} {kernel.arch}": kernel.member for kernel in manifest.kernels} or {
        "GPU kernels": "none in this bundle"
    }
    sections["certificate"] = _certificate_section(certificate.model_dump(mode="json"))
    sections["members"] = {
        "weights": f"{len(manifest.weights)} unique tensors, {format_nbytes(_weights_nbytes(manifest))}",
        **{
            member.name: f"{member.nbytes} bytes at {member.offset}, sha256 {member.sha256[:16]}"
            for member in manifest.members
            if not member.name.startswith("weights/")
        },
    }
    sections["recipe"] = {"recipe": json.dumps(manifest.recipe, sort_keys=True)}
    return sections


def select_section(report: dict[str, Any], name: str) -> dict[str, Any]:
    """One section by name; `graph` selects all graphs.

    Raises:
        RequestError: there is no such section.
    """
    chosen = {key: value for key, value in report.items() if key == name or key.startswith(f"{name} ")}
    if not chosen:
        raise RequestError("--section", f"one of {', '.join(report)} is required, got {name!r}")
    return chosen


def check_bundle(path: Path) -> dict[str, Any]:
    """Hash every member, judge the plan, read the certificate: `checks` name -> ok and detail.

    Raises:
        BundleError: the file is no bundle at all.
    """
    checks: dict[str, dict[str, Any]] = {}

    def run(name: str, check: Callable[[], str]) -> None:
        try:
            checks[name] = {"ok": True, "detail": check()}
        except DscError as error:
            checks[name] = {"ok": False, "detail": str(error)}

    with open_bundle(path) as bundle:
        manifest = bundle.manifest
        draft = manifest.draft.model.info if manifest.draft.model is not None else None

        def hashes() -> str:
            bundle.verify()
            return f"{len(manifest.members)} members, {format_nbytes(len(bundle.map))}"

        def plan() -> str:
            check_plan(parse_plan(bundle.read(KV_PLAN_NAME)), manifest.target.info, draft)
            return "every layer of every model is placed, nothing overlaps"

        def config() -> str:
            return f"policy {parse_config(bundle.read(DFLASH_CONFIG_NAME)).policy}"

        def certificate() -> str:
            found = parse_certificate(bundle.read(CERTIFICATE_NAME))
            if found.verdict != "pass":
                raise RequestError("certificate", f"verdict {found.verdict}: {'; '.join(found.reasons)}")
            return f"passed on {found.device} with {found.kernels} kernels"

        run("structure", lambda: f"schema {manifest.schema_version}, {len(manifest.graphs())} graphs")
        run("hashes", hashes)
        run("kv plan", plan)
        run("schedule", config)
        run("certificate", certificate)
    return {"bundle": str(path), "ok": all(check["ok"] for check in checks.values()), "checks": checks}


def diff_bundles(first: Path, second: Path) -> list[tuple[str, str, str]]:
    """Where two bundles differ: rows of (place, first value, second value)."""
    flat = []
    for path in (first, second):
        with open_bundle(path) as bundle:
            data = bundle.manifest.model_dump(mode="json", exclude={"members", "weights"})
            members = {member.name: member.sha256[:16] for member in bundle.manifest.members}
        flat.append(dict(_flatten({"manifest": data, "members": members})))
    places = sorted(flat[0].keys() | flat[1].keys())
    rows = [(place, flat[0].get(place, "-"), flat[1].get(place, "-")) for place in places]
    return [row for row in rows if row[1] != row[2]]


def set_config(path: Path, assignments: list[str]) -> dict[str, Any]:
    """Apply ``key=value`` changes to `dflash_config.json` and seal the bundle again.

    Raises:
        RequestError: an assignment has no `=`.
        ConfigError: a field is unknown or a value out of range; the bundle stays as it was.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise RequestError(assignment, "key=value is required", "for example windows.default=6")
        changes[key] = _json_or_text(text)
    with open_bundle(path) as bundle:
        config = parse_config(bundle.read(DFLASH_CONFIG_NAME))
    rewrite_members(path, {DFLASH_CONFIG_NAME: dump_config(apply_override(config, changes))})
    return changes


def extract_graph(path: Path, which: str, output: Path | None) -> Path:
    """Write a graph as a plain `.onnx` whose weights stay in the bundle beside it.

    Args:
        which: ``target``, ``draft``, or a graph member's name.
        output: default: beside the bundle. Elsewhere, a viewer sees the graph without its weights.
    """
    with open_bundle(path) as bundle:
        names = {graph.member: graph.member for graph in bundle.manifest.graphs()}
        names |= {f"{owner}": f"{owner}/graph.onnx" for owner in ("target", "draft")}
        member = names.get(which, which)
        if member not in {graph.member for graph in bundle.manifest.graphs()}:
            known = ", ".join(graph.member for graph in bundle.manifest.graphs())
            raise RequestError("--graph", f"one of {known} is required, got {which!r}")
        data = relocate_graph(bundle.read(member), path.name, member)
    if output is None:
        output = path.with_name(f"{path.stem}.{member.replace('/', '.')}")
    try:
        output.write_bytes(data)
    except OSError as error:
        raise RequestError(str(output), f"cannot be written: {error.strerror}") from error
    return output


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _flatten(data: Any, place: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from _flatten(value, f"{place}.{key}" if place else str(key))
    elif isinstance(data, list) and data:
        for index, value in enumerate(data):
            yield from _flatten(value, f"{place}[{index}]")
    else:
        yield place, json.dumps(data)


def _model_section(entry: ModelEntry) -> dict[str, Any]:
    info = entry.info
    windows = sorted({layer.window for layer in info.kv_layers if layer.window is not None})
    section: dict[str, Any] = {
        "architecture": info.architecture,
        "layers": info.n_layers,
        "heads": f"{info.n_heads} query, {info.kv_layers[0].n_kv_heads if info.kv_layers else 0} KV",
        "hidden size": info.hidden_size,
        "vocabulary": info.vocab_size,
        "parameters": f"{info.n_parameters / 1e6:.1f} M",
        "longest sequence": info.max_length,
        "rotary": f"{info.rope.kind}, base {info.rope.theta}",
        "ends with ids": ", ".join(map(str, info.eos_ids)) or "none",
        "weights": info.quantization,
        "KV bytes per token": kv_nbytes_per_token(info),
    }
    if windows:
        section["sliding windows"] = ", ".join(map(str, windows))
    if info.experts is not None:
        section["experts"] = f"{info.experts.n_experts}, {info.experts.top_k} a token"
    return section


def _graph_section(graph: GraphEntry) -> dict[str, Any]:
    return {
        "role": f"{graph.role} on {graph.backend}, {graph.precision}",
        "IR version, opsets": f"{graph.ir_version}; {_join(graph.opsets)}",
        "inputs": _specs(graph.inputs),
        "outputs": _specs(graph.outputs),
        "operators": _join(graph.operators),
        "bodies": ", ".join(graph.functions) or "none needed",
    }


def _specs(specs: Any) -> str:
    shown = [f"{spec.name} {spec.dtype}{list(spec.axes)}" for spec in specs if "_pool" not in spec.name]
    n_pools = len(specs) - len(shown)
    return "; ".join(shown) + (f"; {n_pools} KV pools" if n_pools else "")


def _parameters_section(manifest: Manifest) -> dict[str, Any]:
    by_dtype: dict[str, int] = {}
    for weight in manifest.weights:
        by_dtype[weight.dtype.value] = by_dtype.get(weight.dtype.value, 0) + weight.nbytes
    shared = sum(len(weight.users) > 1 for weight in manifest.weights)
    return {
        **{dtype: format_nbytes(nbytes) for dtype, nbytes in sorted(by_dtype.items())},
        "stored once, used more than once": shared,
    }


def _weights_nbytes(manifest: Manifest) -> int:
    return sum(weight.nbytes for weight in manifest.weights)


def _certificate_section(data: dict[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = {
        "verdict": data["verdict"],
        "measured on": data["device"],
        "kernels": data["kernels"],
    }
    if data["reasons"]:
        section["reasons"] = "; ".join(data["reasons"])
    for check in data["greedy"]:
        same = "identical" if not check["mismatches"] else f"{len(check['mismatches'])} sequences differ"
        section[f"greedy, {check['proposer']}, window {check['window']}"] = (
            f"{same} ({check['n_prompts']} prompts, {check['n_tokens']} tokens)"
        )
    for check in data["sampling"]:
        section[f"sampling, {check['proposer']}, T {check['temperature']}"] = (
            f"chi-square p {check['p_value']:.3f} ({check['n_draws']} draws)"
        )
    for name in ("rows", "tokenizer", "finite", "parity"):
        if data[name] is not None:
            section[name] = ", ".join(f"{key} {value}" for key, value in data[name].items())
    return section


def _join(table: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in table.items())


def _curve(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.1f}" for value in values)
