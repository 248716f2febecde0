"""The cache health evaluator (CHE): looks at the pool of sequences now and then, and repairs within a budget of time.

A scan is due every `scan_ms`, between two rounds. What a scan repairs takes `repair_ms` at most, give or take one step;
what is not complete then goes on at the next scan. Repairs change where rows lie, never what a model reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from time import perf_counter

from dsc.bundle_schema.dflash_config import CacheHealth as HealthConfig
from dsc.runtime.kv_repairs import HasTime, KvRepairs
from dsc.runtime.kv_slots import KvSlots


@dataclass(frozen=True)
class Health:
    """The state of a pool.

    Attributes:
        density: valid rows / rows that hold memory, of live sequences (KDR); 1 when there are none.
        fragmentation: longest run of free slots below the last live one / slots (VFI).
        layer_spread: standard deviation / mean of a sequence's valid rows over the layers of target and draft, of the
            worst sequence (CLCA).
    """

    density: float
    fragmentation: float
    layer_spread: float


def measure(pool: KvSlots) -> Health:
    """Look at a pool."""
    reserved = pool.reserved_rows
    return Health(
        density=pool.valid_rows / reserved if reserved else 1.0,
        fragmentation=pool.longest_hole / pool.n_slots,
        layer_spread=max((_spread(pool.layer_lengths(name)) for name in pool.live), default=0.0),
    )


def _spread(lengths: list[int]) -> float:
    mean = fmean(lengths)
    return pstdev(lengths) / mean if mean else 0.0


@dataclass
class HealthCounts:
    """Decisions since the pool was made.

    Attributes:
        compactions, defragmentations: repairs begun because density or fragmentation was not healthy.
        continued: scans that went on with a repair of an earlier one.
        out_of_time: scans whose budget ended before their repairs did.
        extensions: scans that touched memory ahead of use in all layers.
        extensions_withheld: scans that did not, because the layers' lengths differ too much.
        longest_ms: the longest scan, its repairs included.
    """

    scans: int = 0
    compactions: int = 0
    defragmentations: int = 0
    continued: int = 0
    out_of_time: int = 0
    extensions: int = 0
    extensions_withheld: int = 0
    longest_ms: float = 0.0


def _milliseconds() -> float:
    return perf_counter() * 1000


class CacheHealth:
    """Keeps one pool healthy.

    Args:
        config: when to look, how long to repair, what is healthy; may be replaced at any time.
        clock: milliseconds that never go back.

    Attributes:
        last: what the latest scan saw, before its repairs.
    """

    def __init__(self, pool: KvSlots, config: HealthConfig, clock: Callable[[], float] = _milliseconds) -> None:
        self.config = config
        self.counts = HealthCounts()
        self.repairs = KvRepairs(pool)
        self.last = measure(pool)
        self._pool = pool
        self._clock = clock
        self._scanned = clock()
        self._open: dict[str, Callable[[HasTime], bool]] = {}

    def scan(self) -> Health | None:
        """Look and repair if a scan is due, None otherwise. Call it between rounds, while no forward runs.

        Raises:
            PlanError: something wrote past the end of a zone of the arena.
        """
        now = self._clock()
        if now - self._scanned < self.config.scan_ms:
            return None
        self._scanned = now
        self._pool.arena.check_guards()
        self.last = measure(self._pool)
        self.counts.scans += 1
        self._repair(now + self.config.repair_ms)
        self.counts.longest_ms = max(self.counts.longest_ms, self._clock() - now)
        return self.last

    def _repair(self, deadline: float) -> None:
        def has_time() -> bool:
            return self._clock() < deadline

        self.counts.continued += bool(self._open)
        self._decide()
        for name, repair in list(self._open.items()):
            if repair(has_time):
                del self._open[name]
            if not has_time():
                self.counts.out_of_time += bool(self._open)
                return
        self._extend(has_time)

    def _decide(self) -> None:
        """Begin what is needed and not under way."""
        if self.last.density < self.config.min_density and "compact" not in self._open:
            self._open["compact"] = self.repairs.trim
            self.counts.compactions += 1
        if self.last.fragmentation > self.config.max_fragmentation and "defragment" not in self._open:
            self._open["defragment"] = self.repairs.defragment
            self.counts.defragmentations += 1
        self._open.setdefault("resize", self.repairs.continue_resize)

    def _extend(self, has_time: HasTime) -> None:
        if self.last.layer_spread > self.config.max_layer_spread:
            self.counts.extensions_withheld += 1
            return
        before = self.repairs.counts.extended_rows
        self.repairs.extend(self.config.min_density, has_time)
        self.counts.extensions += self.repairs.counts.extended_rows > before

    def report(self) -> dict[str, float]:
        """The latest state, the decisions and what the repairs did, by name."""
        return {**asdict(self.last), **asdict(self.counts), **asdict(self.repairs.counts), **asdict(self._pool.counts)}
