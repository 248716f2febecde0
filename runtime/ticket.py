"""What a caller holds of a request that an engine runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from threading import Condition
from time import perf_counter

from dsc.bundle_schema.errors import GenerationError
from dsc.runtime.request import Chunk, GenerationResult, Request
from dsc.runtime.stats import GenerationStats


class Ticket:
    """One request in an engine: its chunks as they come, its result, and a way to end it.

    Iterate it for the chunks, from any thread, or asynchronously; each iteration starts at the first chunk.

    Args:
        engine: told when the request is cancelled.
        drive: runs a round, where no thread does.

    Attributes:
        number: counts the engine's requests.
        tenant: who asked.
        started: `perf_counter` when it was submitted.
        stats: counts as the request runs.
    """

    def __init__(
        self,
        number: int,
        request: Request,
        tenant: str,
        engine: Condition,
        drive: Callable[[], object] | None = None,
    ) -> None:
        self.number = number
        self.request = request
        self.tenant = tenant
        self.stats = GenerationStats()
        self.cancelled = False
        self.started = perf_counter()
        self._engine = engine
        self._drive = drive
        self._chunks: list[Chunk] = []
        self._result: GenerationResult | None = None
        self._error: BaseException | None = None
        self._done = False
        self._changed = Condition()
        self._listeners: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """There will be no more chunks."""
        return self._done

    def cancel(self) -> None:
        """End the request at its next round; what it has so far is its result."""
        self.cancelled = True
        with self._engine:
            self._engine.notify_all()

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end.

        Args:
            timeout: seconds; forever when None, and where no thread runs the rounds.

        Raises:
            GenerationError: it was not done in time, or it was cancelled before it had a slot.
            Exception: whatever ended the request: an error of a logits processor, say.
        """
        self._wait(lambda: self._done, timeout)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def __iter__(self) -> Iterator[Chunk]:
        index = 0
        while True:
            self._wait(lambda at=index: self._done or len(self._chunks) > at, None)  # type: ignore[misc]
            if index < len(self._chunks):
                yield self._chunks[index]
                index += 1
            else:
                self.result()
                return

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        loop, changed, index = asyncio.get_running_loop(), asyncio.Event(), 0

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has closed: nobody waits in it
                loop.call_soon_threadsafe(changed.set)

        self._listeners.append(wake)
        try:
            while True:
                changed.clear()
                done = self._done
                while index < len(self._chunks):
                    yield self._chunks[index]
                    index += 1
                if done:
                    self.result()
                    return
                await changed.wait()
        finally:
            self._listeners.remove(wake)

    def push(self, chunk: Chunk) -> None:
        """The engine's: a round's chunk."""
        if chunk.ids or chunk.text:
            self._chunks.append(chunk)
            self._tell()

    def finish(self, result: GenerationResult | None, error: BaseException | None = None) -> None:
        """The engine's: the end."""
        self._result, self._error, self._done = result, error, True
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
        for listener in list(self._listeners):
            listener()

    def _wait(self, reached: Callable[[], bool], timeout: float | None) -> None:
        if self._drive is not None:
            while not reached():
                self._drive()
            return
        with self._changed:
            if not self._changed.wait_for(reached, timeout):
                raise GenerationError(f"request {self.number}", f"is not done after {timeout} s", "wait or cancel it")
