"""A generation's rounds as JSON lines, so that its scheduling can be looked at and played again.

The format is documented in docs/reference/trace.md. Token ids are in it, and with them all that any proposer would have
seen; text is not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final, Self

from dsc.bundle_schema.errors import RequestError

if TYPE_CHECKING:
    from dsc.runtime.speculator import Draft
    from dsc.runtime.stats import GenerationStats

TRACE_SCHEMA: Final = "1.0"

TraceTarget = str | os.PathLike[str] | IO[str]


def open_trace(target: TraceTarget | None) -> AbstractContextManager[TraceWriter | None]:
    """A writer, or nothing where no trace is wanted."""
    return nullcontext() if target is None else TraceWriter(target)


class TraceWriter:
    """Writes the rounds of one generation; a file that is there already is added to.

    Args:
        target: a path, or a text file that stays open.

    Raises:
        RequestError: it is neither a path nor a file, or the file cannot be opened.
    """

    def __init__(self, target: TraceTarget) -> None:
        self._owned = isinstance(target, str | os.PathLike)
        self._index = 0
        if isinstance(target, str | os.PathLike):
            try:
                self._file: IO[str] = Path(target).open("a", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                raise RequestError(str(target), f"the trace cannot be written: {error.strerror}") from error
        elif hasattr(target, "write"):
            self._file = target
        else:
            raise RequestError("trace", f"a path or a text file is required, got {target!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owned:
            self._file.close()

    def request(self, stats: GenerationStats, prompt: Sequence[int], max_tokens: int, stop_ids: Iterable[int]) -> None:
        """The first line: what was asked, and by which schedule."""
        self._write(
            {
                "event": "request",
                "schema_version": TRACE_SCHEMA,
                "policy": stats.policy,
                "config_version": stats.config_version,
                "speculation": stats.speculation,
                "costs": stats.costs,
                "kernels": stats.kernels,
                "provider": stats.provider,
                "seed": stats.seed,
                "max_tokens": max_tokens,
                "cached_tokens": stats.cached_tokens,
                "stop_ids": sorted(stop_ids),
                "prompt_ids": list(prompt),
            }
        )

    def round(self, n_tokens: int, draft: Draft, accepted: int, new: Sequence[int], ms: dict[str, float]) -> None:
        """One line a round.

        Args:
            n_tokens: length of the sequence before the round.
            new: tokens it committed.
            ms: milliseconds by phase.
        """
        judged = min(accepted + 1, len(draft.ids))
        signals = draft.signals
        self._write(
            {
                "event": "round",
                "round": self._index,
                "n_tokens": n_tokens,
                "proposer": draft.proposer,
                "window": draft.window,
                "reason": draft.reason,
                "lag": draft.lag,
                "start": draft.start,
                "draft_ids": list(draft.ids),
                "accepted": accepted,
                "positions": [int(position < accepted) for position in range(judged)],
                "new_ids": list(new),
                "signals": None if signals is None else {k: _short(v) for k, v in vars(signals).items()},
                "ms": {phase: round(value, 4) for phase, value in ms.items()},
            }
        )
        self._index += 1

    def end(self, stats: GenerationStats, reason: str) -> None:
        """The last line: how it ended, and how many of the committed tokens belong to the result."""
        self._write(
            {
                "event": "end",
                "finish_reason": reason,
                "emitted": stats.emitted,
                "discarded": stats.discarded,
                "config_updates": stats.config_updates,
                "total_ms": round(stats.total_ms, 3),
                "first_token_ms": round(stats.first_token_ms, 3),
            }
        )

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
