"""`dsc plan`: the KV layout as data and as a picture, and the two questions people ask of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from dsc.bundle_schema.container import open_bundle
from dsc.bundle_schema.errors import RequestError
from dsc.bundle_schema.kv_layout import draft_shares
from dsc.bundle_schema.kv_plan import PLAN_NAMES, KvPlan, parse_plan
from dsc.compiler.console import save_picture
from dsc.compiler.plan_kv import kv_nbytes_per_token, longest_length, plan_kv

GIB = 1 << 30
PICTURE_SUFFIXES = (".png", ".svg")
SHARES = "continues the target's cache"
"""Said of a draft without rows of its own."""


def plan_report(
    path: Path, max_length: int | None, n_slots: int | None, memory_gib: float | None, backend: str = "cpu"
) -> tuple[dict[str, Any], KvPlan]:
    """The bundle's own plan, or the plan for another length or number of slots, on the CPU or on CUDA.

    Returns:
        A JSON-able report (sizes, slots, and with `memory_gib` whether it fits and the longest length that
        does), and the plan it describes.

    Raises:
        RequestError: the bundle has no plan for `backend`.
        BundleError, PlanError: the bundle or the wanted plan is not valid.
    """
    with open_bundle(path) as bundle:
        manifest = bundle.manifest
        plans = {key: bundle.read(name) for key, name in PLAN_NAMES.items() if name in bundle.members}
    where = next((key for key in plans if key == backend), None)
    if where is None:
        raise RequestError("--backend", f"one of {', '.join(plans)} is required, got {backend!r}")
    plan = parse_plan(plans[where], PLAN_NAMES[where])
    target = manifest.target.info_on(where)
    draft = manifest.draft.model.info_on(where) if manifest.draft.model is not None else None
    shared = draft_shares(plan)
    own = draft if draft is not None and not shared else None
    if max_length is not None or n_slots is not None:
        length = plan.max_length if max_length is None else max_length
        n_slots = plan.n_slots if n_slots is None else n_slots
        plan = plan_kv(target, draft, length, plan.rollback_slack, n_slots, shared)
    report: dict[str, Any] = {
        "max_length": plan.max_length,
        "n_slots": plan.n_slots,
        "rollback_slack": plan.rollback_slack,
        "rows": describe_rows(plan),
        "bytes_per_token": kv_nbytes_per_token(target) + (kv_nbytes_per_token(own) if own else 0),
        "total_nbytes": plan.total_nbytes,
        "total_GiB": round(plan.total_nbytes / GIB, 4),
        "zones": {zone.name: [zone.offset, zone.nbytes] for zone in plan.zones},
        **({"draft": SHARES} if shared else {}),
        "slots": [
            {
                "owner": slot.owner,
                "layer": slot.layer,
                "role": slot.role,
                "dtype": slot.dtype.value,
                "shape": list(slot.shape),
                "offset": slot.offset,
                "bytes": slot.nbytes,
                "window": slot.window,
            }
            for slot in plan.slots
            if slot.shared_with is None
        ],
    }
    if memory_gib is not None:
        if not 0 < memory_gib < 1 << 20:
            raise RequestError("--memory", f"a positive number of GiB is required, got {memory_gib}")
        limit = int(memory_gib * GIB)
        report["fits"] = plan.total_nbytes <= limit
        report["longest_max_length"] = longest_length(target, draft, limit, plan.rollback_slack, plan.n_slots, shared)
    return report, plan


def describe_rows(plan: KvPlan) -> str:
    """How many rows layers have, e.g. ``640 in 15 layers (rings of window 512), 32896 in 3 layers``."""
    found = Counter((slot.rows, slot.window) for slot in plan.slots if slot.role == "k" and slot.shared_with is None)
    parts = []
    for (rows, window), count in sorted(found.items(), key=lambda item: item[0][0]):
        ring = f" (rings of window {window})" if window is not None else ""
        parts.append(f"{rows} in {count} layer{'s'[: count > 1]}{ring}")
    return ", ".join(parts) or "none"


def draw_plan(plan: KvPlan, picture: Path) -> None:
    """Draw the arena as one bar a zone: keys and values of each layer, guards, to scale.

    Raises:
        RequestError: the file's ending is neither .png nor .svg, or it cannot be written.
    """
    if picture.suffix not in PICTURE_SUFFIXES:
        raise RequestError(str(picture), f"one of {', '.join(PICTURE_SUFFIXES)} is required as ending")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch, Rectangle

    colours = {"k": "#4477aa", "v": "#ee9944"}
    mib = 1 << 20
    figure, axes = pyplot.subplots(
        len(plan.zones), 1, figsize=(11, 1.2 + 1.5 * len(plan.zones)), squeeze=False, layout="constrained"
    )
    for zone, axis in zip(plan.zones, axes[:, 0], strict=True):
        free = 0.0  # where the next number does not touch the one before
        for slot in plan.slots:
            if slot.owner == zone.name:
                box = (slot.offset / mib, 0.0)
                axis.add_patch(Rectangle(box, slot.nbytes / mib, 1.0, facecolor=colours[slot.role], edgecolor="white"))
                if slot.role == "k" and box[0] >= free:
                    axis.text(box[0], 1.05, str(slot.layer), fontsize=7)
                    free = box[0] + zone.nbytes / mib / 50
        axis.axvline(zone.guard_offset / mib, color="crimson", linewidth=2)
        axis.set_xlim(zone.offset / mib, (zone.guard_offset + zone.guard_nbytes) / mib)
        axis.set_ylim(0, 1.25)
        axis.set_yticks([])
        axis.set_ylabel(zone.name)
    axes[-1, 0].set_xlabel("MiB from the arena's start; the numbers are layers")
    figure.legend(
        handles=[
            Patch(color=colours["k"], label="keys"),
            Patch(color=colours["v"], label="values"),
            Patch(color="crimson", label="guard"),
        ],
        loc="outside right upper",
        fontsize=8,
    )
    figure.suptitle(
        f"KV arena: {plan.total_nbytes / mib:.1f} MiB, {plan.max_length} positions x {plan.n_slots} slots; "
        f"rows: {describe_rows(plan)}"
    )
    save_picture(figure, picture)
