"""A generation's rounds as JSON lines, so that its scheduling can be looked at and played again.

The format is documented in docs/reference/trace.md. Token ids are in it, and with them all that any proposer would have
seen; text is not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final, Self, cast

from dsc.bundle_schema.errors import RequestError

if TYPE_CHECKING:
    from dsc.runtime.model_id import ModelId
    from dsc.runtime.speculator import Draft
    from dsc.runtime.stats import GenerationStats

TRACE_SCHEMA: Final = "1.2"

TraceTarget = str | os.PathLike[str] | IO[str]


def trace_target(value: Any) -> TraceTarget | None:
    """What a caller gave as a trace.

    Raises:
        RequestError: it is neither a path nor a file.
    """
    if value is None or isinstance(value, str | os.PathLike) or hasattr(value, "write"):
        return cast("TraceTarget | None", value)
    raise RequestError("trace", f"a path or a text file is required, got {value!r}")


def open_trace(target: TraceTarget | None) -> AbstractContextManager[TraceWriter | None]:
    """A writer, or nothing where no trace is wanted."""
    return nullcontext() if target is None else TraceWriter(target)


class TraceWriter:
    """Writes the rounds of one generation; a file that is there already is added to.

    Args:
        target: a path, or a text file that stays open.

    Raises:
        RequestError: the file cannot be opened, or later not be written.
    """

    def __init__(self, target: TraceTarget) -> None:
        self._owned = isinstance(target, str | os.PathLike)
        self._where = str(target) if self._owned else "trace"
        self._index = 0
        if isinstance(target, str | os.PathLike):
            with self._errors():
                self._file: IO[str] = Path(target).open("a", encoding="utf-8")  # noqa: SIM115
        else:
            self._file = target

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # the disk is full, the file was closed, the name is none
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise RequestError(self._where, f"the trace cannot be written: {why}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owned:
            with self._errors():
                self._file.close()

    def request(
        self, stats: GenerationStats, model: ModelId, prompt: Sequence[int], max_tokens: int, stop_ids: Iterable[int]
    ) -> None:
        """The first line: what was asked, of which model, and by which schedule."""
        self._write(
            {
                "event": "request",
                "schema_version": TRACE_SCHEMA,
                "name": model.name,
                "model": model.digest,
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
                "failure": round(draft.history.failure, 6),
                "locked": draft.history.locked,
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
        with self._errors():
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
