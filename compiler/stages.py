"""Named stages of a compile: progress for people, seconds and peak memory for the report."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

STAGES = ("import", "export", "pair", "passes", "plan", "kernels", "emit", "gate", "seal")

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class StageReport:
    """What one stage took; `peak_rss_nbytes` is the highest resident size of this process during the stage.

    GPU kernels are compiled by other processes, which do not count.
    """

    name: str
    seconds: float
    peak_rss_nbytes: int


@dataclass
class StageLog:
    """Runs stages one after another; `on_stage(name, index, total)` is called as each begins."""

    on_stage: Callable[[str, int, int], None] | None = None
    reports: list[StageReport] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the body as stage `name`."""
        if self.on_stage is not None:
            self.on_stage(name, STAGES.index(name), len(STAGES))
        _reset_peak()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.reports.append(StageReport(name, time.perf_counter() - start, peak_rss_nbytes()))


def _reset_peak() -> None:
    """Restart the kernel's high-water mark of resident memory, where the kernel lets us."""
    with suppress(OSError):
        _CLEAR_REFS.write_text("5")


def peak_rss_nbytes() -> int:
    """Highest resident size since the last reset (Linux) or since the start of the process."""
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
