"""What `dsc inspect` says of a bundle, section by section; reads the small members only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsc.bundle_schema.certificate import CERTIFICATE_NAME, Certificate, parse_certificate
from dsc.bundle_schema.container import StoredTensor, open_bundle
from dsc.bundle_schema.dflash_config import DFLASH_CONFIG_NAME, DflashConfig, parse_config
from dsc.bundle_schema.errors import RequestError
from dsc.bundle_schema.kv_layout import draft_shares
from dsc.bundle_schema.kv_plan import PLAN_NAMES, GraphBackend, KvPlan, parse_plan
from dsc.bundle_schema.manifest import GraphEntry, Manifest, ModelEntry
from dsc.compiler.bundle_kernels import kernels_section
from dsc.compiler.console import format_nbytes
from dsc.compiler.plan_kv import kv_nbytes_per_token
from dsc.compiler.plan_report import SHARES, describe_rows


def inspect_bundle(path: Path) -> dict[str, Any]:
    """Every section that `dsc inspect` prints, as JSON-able data."""
    with open_bundle(path) as bundle:
        manifest = bundle.manifest
        held = {backend: name for backend, name in PLAN_NAMES.items() if name in bundle.members}
        plans = {backend: parse_plan(bundle.read(name), name) for backend, name in held.items()}
        config = parse_config(bundle.read(DFLASH_CONFIG_NAME))
        certificate = parse_certificate(bundle.read(CERTIFICATE_NAME))
        weights = bundle.weights()
        total = len(bundle.map)
    return {
        "identity": _identity_section(path, total, manifest, certificate),
        "provenance": _provenance_section(manifest),
        "needs": _needs_section(manifest, plans),
        **_model_sections(manifest),
        **{f"graph {graph.member}": _graph_section(graph) for graph in manifest.graphs()},
        "parameters": _parameters_section(weights),
        **{f"kv_plan {backend}": _plan_section(manifest, plan, backend) for backend, plan in plans.items()},
        "schedule": _schedule_section(config),
        "tokenizer": _tokenizer_section(manifest),
        "kernels": kernels_section(manifest),
        "certificate": _certificate_section(certificate),
        "members": _members_section(manifest, weights),
        "recipe": {"recipe": json.dumps(manifest.recipe, sort_keys=True)},
    }


def select_section(report: dict[str, Any], name: str) -> dict[str, Any]:
    """One section by name; `graph` selects all graphs.

    Raises:
        RequestError: there is no such section.
    """
    chosen = {key: value for key, value in report.items() if key == name or key.startswith(f"{name} ")}
    if not chosen:
        raise RequestError("--section", f"one of {', '.join(report)} is required, got {name!r}")
    return chosen


def _identity_section(path: Path, total: int, manifest: Manifest, certificate: Certificate) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "file": str(path),
        "size": f"{format_nbytes(total)} ({total} bytes)",
        "schema": manifest.schema_version,
        "draft": manifest.draft.kind,
        "verdict": certificate.verdict,
    }


def _provenance_section(manifest: Manifest) -> dict[str, Any]:
    return {
        **{f"made by {tool}": version for tool, version in manifest.created_by.items()},
        **{f"source of {part}": text for part, text in manifest.sources.items()},
        **{f"licence of {part}": text for part, text in manifest.licences.items()},
    }


def _needs_section(manifest: Manifest, plans: dict[GraphBackend, KvPlan]) -> dict[str, Any]:
    return {
        "onnxruntime": f">= {manifest.requires.min_onnxruntime}",
        "IR version": manifest.requires.ir_version,
        "opsets": _join(manifest.requires.opsets),
        **{f"KV memory on {backend}": format_nbytes(plan.total_nbytes) for backend, plan in plans.items()},
    }


def _model_sections(manifest: Manifest) -> dict[str, Any]:
    sections = {"target": _model_section(manifest.target)}
    if manifest.draft.model is not None:
        sections["draft"] = _model_section(manifest.draft.model)
    return sections


def _plan_section(manifest: Manifest, plan: KvPlan, backend: GraphBackend) -> dict[str, Any]:
    return {
        "positions": plan.max_length,
        "slots": plan.n_slots,
        "rollback slack": plan.rollback_slack,
        "rows a layer": describe_rows(plan),
        "element type": manifest.target.info_on(backend).kv_dtype.value,
        "bytes per token": kv_nbytes_per_token(manifest.target.info_on(backend)),
        "bytes at maximum length": format_nbytes(plan.total_nbytes),
        "zones": ", ".join(f"{zone.name} {format_nbytes(zone.nbytes)}" for zone in plan.zones),
        **({"draft": SHARES} if draft_shares(plan) else {}),
    }


def _schedule_section(config: DflashConfig) -> dict[str, Any]:
    return {
        "policy": config.policy,
        "windows": f"{config.windows.min}..{config.windows.max}, first {config.windows.default}",
        "proposers": ", ".join(sorted(config.proposers)) or "none",
        "fall-back": f"at most {config.fallback.max_overhead:.0%} slower than plain decoding",
        **{f"verify ms on {c.device}, {c.context} in the cache": _curve(c.verify_ms) for c in config.costs},
    }


def _tokenizer_section(manifest: Manifest) -> dict[str, Any]:
    return {
        "files": ", ".join(manifest.tokenizer.members) or "none: token ids only",
        "verdict": manifest.tokenizer.verdict,
        "summary": manifest.tokenizer.summary,
    }


def _members_section(manifest: Manifest, weights: tuple[StoredTensor, ...]) -> dict[str, Any]:
    return {
        "weights": f"{len(weights)} unique tensors, {format_nbytes(sum(weight.nbytes for weight in weights))}",
        **{
            member.name: f"{member.nbytes} bytes at {member.offset}, sha256 {member.sha256[:16]}"
            for member in manifest.members
        },
    }


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


def _parameters_section(weights: tuple[StoredTensor, ...]) -> dict[str, Any]:
    by_dtype: dict[str, int] = {}
    for weight in weights:
        by_dtype[weight.dtype.value] = by_dtype.get(weight.dtype.value, 0) + weight.nbytes
    shared = sum(len(weight.users) > 1 for weight in weights)
    return {
        **{dtype: format_nbytes(nbytes) for dtype, nbytes in sorted(by_dtype.items())},
        "stored once, used more than once": shared,
    }


def _certificate_section(certificate: Certificate) -> dict[str, Any]:
    data = certificate.model_dump(mode="json")
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
