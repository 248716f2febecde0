"""Memory pressure: what is given up while the machine's memory is nearly full, and taken back when it is not.

When more than a share of the memory has been in use for a time, windows get a cap, the bundle's draft model rests so
that lookups draft in its place, saved prefixes go, and journals of rejected rows stop. No request fails for it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from dsc.bundle_schema.dflash_config import DflashConfig, MemoryPressure, ProposerKind
from dsc.runtime.host_memory import memory_share

_LOOK_SECONDS = 1.0
_LOOKUPS = ("none", "ngram", "cache", "suffix")


class PressureWatch:
    """Looks at the memory now and then.

    Args:
        draft: the kind of draft that the bundle has.
        share: the share of the memory in use, None when it is not known.
        clock: seconds that never go back.

    Attributes:
        pressed: the rule is in force.
    """

    def __init__(
        self,
        draft: ProposerKind = "none",
        share: Callable[[], float | None] = memory_share,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.pressed = False
        self._draft = draft
        self._share = share
        self._clock = clock
        self._looked = clock() - _LOOK_SECONDS
        self._since: float | None = None  # when the memory was first seen above the threshold

    def changed(self, config: MemoryPressure) -> bool:
        """Look if a look is due; says whether the rule has come into force or ended."""
        now = self._clock()
        if now - self._looked < _LOOK_SECONDS:
            return False
        self._looked = now
        share = self._share()
        if share is None or share <= config.threshold:
            self._since = None
        elif self._since is None:
            self._since = now
        before, self.pressed = self.pressed, self._since is not None and now - self._since >= config.seconds
        return self.pressed != before

    def changes(self, config: DflashConfig) -> dict[str, Any]:
        """What the rule changes in a configuration, by dotted path; nothing while it is not in force."""
        if not self.pressed:
            return {}
        cap, windows = config.pressure.window, config.windows
        changes: dict[str, Any] = {
            f"windows.{name}": min(getattr(windows, name), cap) for name in ("min", "default", "max")
        }
        changes["cache.prefix_max_nbytes"] = 0
        if self._draft not in _LOOKUPS:
            changes[f"proposers.{self._draft}.enabled"] = False
        return changes
