"""How many CPUs this process may use: those that it may run on, or its container's share of time if that is less."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

# Files with the microseconds of CPU time in a period and the period's: control groups version 2, then version 1.
_QUOTAS = (
    ("sys/fs/cgroup/cpu.max",),
    ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


def allowed_cpus(root: Path = Path("/")) -> int:
    """At least one; a share of a CPU counts as one more."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    return max(min([cpus, *map(ceil, _shares(root))]), 1)


def _shares(root: Path) -> list[float]:
    """CPUs' worth of time that the container may use, where it has a limit."""
    shares = []
    for names in _QUOTAS:
        try:
            quota, period = (int(word) for name in names for word in (root / name).read_text().split())
        except (OSError, ValueError):  # there is no such file, or it says "max"
            continue
        if quota > 0 and period > 0:  # version 1 writes -1 for no limit
            shares.append(quota / period)
    return shares
