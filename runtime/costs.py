"""What a round costs on this machine: the curve that was measured on one like it, or an assumption that says so."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import onnxruntime as ort

from dsc.bundle_schema.dflash_config import CostCurve, DflashConfig, ProposerKind
from dsc.runtime.host import SessionSettings
from dsc.runtime.schedule_costs import LiveCosts

MEASURED_HERE = "measured on this device"

# A forward over r rows, in plain steps, when nothing was measured: between bandwidth-bound (flat) and compute-bound.
_ASSUMED_VERIFY = tuple(1 + 0.2 * rows for rows in range(16))
_ASSUMED_DRAFT = 0.25


@cache
def cpu_name() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def device_fingerprint(settings: SessionSettings) -> str:
    """What measured costs depend on: device, threads, onnxruntime and kernels."""
    software = f"onnxruntime {ort.__version__}, {settings.kernels} kernels"
    return f"{settings.provider}: {cpu_name()}, {settings.threads} threads, {software}"


def costs_for(config: DflashConfig, settings: SessionSettings, kind: ProposerKind) -> tuple[LiveCosts, str]:
    """Costs of rounds with a proposer, and where they come from."""
    curve = config.cost_curve(device_fingerprint(settings))
    source = MEASURED_HERE
    if curve is None and config.costs:
        curve = config.costs[0]
        source = f"measured on {curve.device}"
    if curve is None:
        return assumed_costs(config, kind), "assumed"
    return curve_costs(config, curve, kind), source


def curve_costs(config: DflashConfig, curve: CostCurve, kind: ProposerKind) -> LiveCosts:
    """Costs of rounds with a proposer by a measured curve."""
    return LiveCosts(curve.verify_ms, curve.draft_ms.get(kind, ()), curve.host_ms, config.calibrated.decay)


def assumed_costs(config: DflashConfig, kind: ProposerKind) -> LiveCosts:
    """Costs where nothing was measured; copying costs nothing."""
    draft = () if kind in ("ngram", "cache") else tuple(_ASSUMED_DRAFT * window for window in range(1, 17))
    return LiveCosts(_ASSUMED_VERIFY, draft, 0.0, config.calibrated.decay)
