"""What a round costs on this machine: the curve that was measured on one like it, or an assumption that says so."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import onnxruntime as ort

from dsc.bundle_schema.dflash_config import CostCurve, DflashConfig, ProposerKind
from dsc.runtime.draft_reading import LATE_TOKENS
from dsc.runtime.host import SessionSettings
from dsc.runtime.schedule_costs import LiveCosts

MEASURED_HERE = "measured on this device"

# A forward over r rows, in plain steps, when nothing was measured: between bandwidth-bound (flat) and compute-bound.
_ASSUMED_VERIFY = tuple(1 + 0.2 * rows for rows in range(16))
_ASSUMED_DRAFT = 0.25


@cache
def cpu_name() -> str:
    """The processor's name as the system tells it, with its family and model: on virtual machines the name is that of
    several generations.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").partition("\n\n")[0].splitlines() if info.exists() else []
    known = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = known.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{key.split()[-1]} {known[key]}" for key in ("cpu family", "model") if key in known]
    return " ".join([name, *numbers])


def device_fingerprint(settings: SessionSettings) -> str:
    """What measured costs depend on: device, threads, onnxruntime and kernels."""
    software = f"onnxruntime {ort.__version__}, {settings.kernels} kernels"
    return f"{settings.provider}: {settings.device or cpu_name()}, {settings.threads} threads, {software}"


def costs_for(
    config: DflashConfig,
    settings: SessionSettings,
    kind: ProposerKind,
    context: int,
    earlier: LiveCosts | None = None,
) -> tuple[LiveCosts, str]:
    """Costs of rounds with a proposer after `context` tokens, and where they come from.

    Args:
        earlier: what was measured since the model was loaded.
    """
    curves = config.cost_curves(device_fingerprint(settings))
    source = MEASURED_HERE
    if not curves and config.costs:
        curves = config.cost_curves(config.costs[0].device)
        source = f"measured on {curves[0].device}"
    if not curves:
        return assumed_costs(config, kind, earlier), "assumed"
    return curve_costs(config, curves, kind, context, earlier), source


def curve_at(curves: Sequence[CostCurve], context: int) -> CostCurve:
    """The costs with `context` rows in the cache: in proportion between the two nearest of one device's curves.

    Args:
        curves: the shortest context first; outside of them the nearest holds.
    """
    after = next((place for place, curve in enumerate(curves) if curve.context >= context), len(curves) - 1)
    low, high = curves[max(after - 1, 0)], curves[after]
    if not low.context < context < high.context:
        return high if context >= high.context else low
    share = (context - low.context) / (high.context - low.context)

    def between(one: float, other: float) -> float:
        return one + share * (other - one)

    return high.model_copy(
        update={
            "context": context,
            "verify_ms": tuple(map(between, low.verify_ms, high.verify_ms)),
            "draft_ms": {
                kind: tuple(map(between, low.draft_ms.get(kind, ms), ms)) for kind, ms in high.draft_ms.items()
            },
            "read_ms": {kind: between(low.read_ms.get(kind, ms), ms) for kind, ms in high.read_ms.items()},
            "host_ms": between(low.host_ms, high.host_ms),
        }
    )


def curve_costs(
    config: DflashConfig,
    curves: Sequence[CostCurve],
    kind: ProposerKind,
    context: int,
    earlier: LiveCosts | None = None,
) -> LiveCosts:
    """Costs of rounds with a proposer after `context` tokens by a device's measured curves."""
    curve, late = curve_at(curves, context), curve_at(curves, min(context, LATE_TOKENS))
    return LiveCosts(
        curve.verify_ms,
        curve.draft_ms.get(kind, ()),
        curve.host_ms,
        config.calibrated.decay,
        curve.read_ms.get(kind, 0.0),
        earlier,
        late.draft_ms.get(kind, ()),
    )


def assumed_costs(config: DflashConfig, kind: ProposerKind, earlier: LiveCosts | None = None) -> LiveCosts:
    """Costs where nothing was measured; copying costs nothing."""
    draft = () if kind in ("ngram", "cache") else tuple(_ASSUMED_DRAFT * window for window in range(1, 17))
    return LiveCosts(_ASSUMED_VERIFY, draft, 0.0, config.calibrated.decay, earlier=earlier)
