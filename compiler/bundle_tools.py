"""What can be done with a bundle file without running it: check, diff, set, extract a graph."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dsc.bundle_schema.certificate import CERTIFICATE_NAME, parse_certificate
from dsc.bundle_schema.container import (
    INDEX_NAME,
    OpenBundle,
    StoredTensor,
    open_bundle,
    relocate_graph,
    rewrite_members,
)
from dsc.bundle_schema.dflash_config import DFLASH_CONFIG_NAME, apply_override, dump_config, parse_config
from dsc.bundle_schema.errors import CheckFailed, DscError, RequestError
from dsc.bundle_schema.kv_layout import draft_shares
from dsc.bundle_schema.kv_plan import PLAN_NAMES, check_plan, parse_plan
from dsc.bundle_schema.whole_file import whole_file
from dsc.compiler.bundle_kernels import check_kernels
from dsc.compiler.console import format_nbytes
from dsc.runtime.config_notes import unread_fields, unused_fields

GRAPH_SUFFIX = ".onnx"


def check_bundle(path: Path) -> dict[str, Any]:
    """Hash every member, judge the plan, read the certificate: `checks` name -> ok and detail.

    Raises:
        BundleError: the file is no bundle at all.
    """
    checks: dict[str, dict[str, Any]] = {}
    with open_bundle(path) as bundle:
        for name, check in _CHECKS.items():
            try:
                checks[name] = {"ok": True, "detail": check(bundle)}
            except DscError as error:
                checks[name] = {"ok": False, "detail": str(error)}
    return {"bundle": str(path), "ok": all(check["ok"] for check in checks.values()), "checks": checks}


def _check_structure(bundle: OpenBundle) -> str:
    return f"schema {bundle.manifest.schema_version}, {len(bundle.manifest.graphs())} graphs"


def _check_hashes(bundle: OpenBundle) -> str:
    bundle.verify()
    return f"{len(bundle.manifest.members)} members, {format_nbytes(len(bundle.map))}"


def _check_weights(bundle: OpenBundle) -> str:
    tensors = bundle.weights()
    end = tensors[0].offset if tensors else 0
    for tensor in tensors:
        if any(bundle.map[end : tensor.offset]):
            raise CheckFailed(INDEX_NAME, f"zeros are required before {_first_user(tensor)}")
        end = tensor.offset + tensor.nbytes
        with memoryview(bundle.map)[tensor.offset : end] as data:
            if hashlib.sha256(data).hexdigest() != tensor.sha256:
                raise CheckFailed(INDEX_NAME, f"{_first_user(tensor)} is not the tensor with SHA-256 {tensor.sha256}")
    return f"{len(tensors)} unique tensors"


def _first_user(tensor: StoredTensor) -> str:
    return next(iter(tensor.users), f"the tensor at {tensor.offset}")


def _check_plan(bundle: OpenBundle) -> str:
    target, draft = bundle.manifest.target, bundle.manifest.draft.model
    backends = dict.fromkeys(graph.backend for graph in target.graphs)
    for backend in backends:
        plan = parse_plan(bundle.read(PLAN_NAMES[backend]), PLAN_NAMES[backend])
        check_plan(plan, target.info_on(backend), draft.info_on(backend) if draft is not None else None)
        draft_shares(plan)
    return f"every layer of every model is placed on {', '.join(backends)}, nothing overlaps"


def _check_schedule(bundle: OpenBundle) -> str:
    return f"policy {parse_config(bundle.read(DFLASH_CONFIG_NAME)).policy}"


def _check_certificate(bundle: OpenBundle) -> str:
    found = parse_certificate(bundle.read(CERTIFICATE_NAME))
    if found.verdict != "pass":
        raise CheckFailed("certificate", f"verdict {found.verdict}: {'; '.join(found.reasons)}")
    return f"passed on {found.device} with {found.kernels} kernels"


_CHECKS: dict[str, Callable[[OpenBundle], str]] = {
    "structure": _check_structure,
    "hashes": _check_hashes,
    "weights": _check_weights,
    "kv plan": _check_plan,
    "kernels": check_kernels,
    "schedule": _check_schedule,
    "certificate": _check_certificate,
}


def diff_bundles(first: Path, second: Path) -> list[tuple[str, str, str]]:
    """Where two bundles differ: rows of (place, first value, second value)."""
    flat = []
    for path in (first, second):
        with open_bundle(path) as bundle:
            data = bundle.manifest.model_dump(mode="json", exclude={"members"})
            members = {member.name: member.sha256[:16] for member in bundle.manifest.members}
            weights = {user: weight.sha256[:16] for weight in bundle.weights() for user in weight.users}
        flat.append(dict(_flatten({"manifest": data, "members": members, "weights": weights})))
    places = sorted(flat[0].keys() | flat[1].keys())
    rows = [(place, flat[0].get(place, "-"), flat[1].get(place, "-")) for place in places]
    return [row for row in rows if row[1] != row[2]]


def set_config(path: Path, assignments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Apply ``key=value`` changes to `dflash_config.json` and seal the bundle again.

    Returns:
        The changes, and notes on fields of the new configuration that change nothing, with the reason.

    Raises:
        RequestError: an assignment has no `=`, or a key comes twice.
        ConfigError: a field is unknown or a value out of range; the bundle stays as it was.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise RequestError(assignment, "key=value is required", "for example windows.default=6")
        if key in changes:
            raise RequestError(key, "one value is required, got several")
        changes[key] = _json_or_text(text)
    with open_bundle(path) as bundle:
        before, draft = parse_config(bundle.read(DFLASH_CONFIG_NAME)), bundle.manifest.draft.kind
    config = apply_override(before, changes)
    rewrite_members(path, {DFLASH_CONFIG_NAME: dump_config(config)})
    return changes, [*unused_fields(config, draft), *unread_fields(before, config)]


def extract_graph(path: Path, which: str, output: Path | None) -> Path:
    """Write a graph as a plain `.onnx` whose weights stay in the bundle beside it.

    Args:
        which: ``target``, ``draft``, or a graph member's name.
        output: default: beside the bundle. Elsewhere, a viewer sees the graph without its weights.

    Raises:
        RequestError: there is no such graph, or `output` cannot be written or is the bundle itself.
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
    if output.exists() and (output.samefile(path) or not output.is_file()):
        raise RequestError("--output", f"another file than the bundle is required, got {output}")
    if output.exists() and output.suffix != GRAPH_SUFFIX:
        raise RequestError(str(output), f"only an {GRAPH_SUFFIX} file may be replaced", "give another --output")
    try:
        with whole_file(output) as file:
            file.write(data)
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
