"""An engine: many requests at once over one model, each with the output that it would have alone.

Requests wait in line for a slot of the KV pool, and join and leave between rounds (`dsc.runtime.rounds`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from threading import Condition, Lock, Thread
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dsc.bundle_schema.errors import GenerationError, RequestError
from dsc.runtime.arguments import flag, whole_number
from dsc.runtime.request import Prompt
from dsc.runtime.rounds import Rounds
from dsc.runtime.tenants import cap_request, tenant_cap
from dsc.runtime.ticket import Ticket
from dsc.runtime.waiting_line import WaitingLine

if TYPE_CHECKING:
    from dsc.runtime.generate import SpeculativeModel

PREFILL_STRETCH = 2.0
"""How much longer a round may take because prompts are read beside it."""


class Engine:
    """Runs requests over the slots of one KV pool; made by `SpeculativeModel.engine`.

    A thread runs the rounds, from the first request until `close`; with ``background=False`` whoever waits for a
    result, or calls `run`, does. The model itself stays usable: its weights are shared, its cache is its own.

    Args:
        slots: sequences that run at once.
        max_waiting: requests that may wait for a slot.
        prefill_stretch: how much longer a round may take because prompts are read beside it.
        clock: seconds that never go back, for time limits.

    Raises:
        HostError: the model runs on a device, where rows are not packed.
        RequestError: an argument is out of range.
    """

    def __init__(
        self,
        model: SpeculativeModel,
        slots: int = 4,
        max_waiting: int = 1024,
        prefill_stretch: float = PREFILL_STRETCH,
        background: bool = True,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        if not _is_number(prefill_stretch) or not prefill_stretch >= 1:
            raise RequestError("prefill_stretch", f"at least 1 is required, got {prefill_stretch!r}")
        self._model = model
        self._rounds = Rounds(model, slots, prefill_stretch)
        self._line = WaitingLine(
            whole_number(max_waiting, "max_waiting", 1), lambda tenant: tenant_cap(model.config, tenant).weight
        )
        self._changed = Condition()
        self._stepping = Lock()  # one round at a time, whoever runs it
        self._background = flag(background, "background")
        self._clock = clock
        self._thread: Thread | None = None
        self._closed = False

    def submit(self, prompt: Prompt, *, tenant: str = "", time_limit: float | None = None, **options: Any) -> Ticket:
        """Queue a request.

        Args:
            tenant: requests of different tenants take turns for free slots by their weights, within their caps.
            time_limit: seconds from now after which the request ends with what it has.
            options: those of `SpeculativeModel.generate`.

        Raises:
            RequestError: an argument is wrong.
            GenerationError: the prompt does not fit, too many requests wait, or the engine is closed.
        """
        request = self._model.stream(prompt, **options).request
        if not isinstance(tenant, str):
            raise RequestError("tenant", f"a name is required, got {tenant!r}")
        request = cap_request(request, tenant_cap(self._model.config, tenant))
        if time_limit is not None and not (_is_number(time_limit) and time_limit > 0):
            raise RequestError("time_limit", f"seconds above 0 are required, got {time_limit!r}")
        with self._changed:
            self._require_open()
            request = self._rounds.length.fit(request, self._model.bundle.manifest.target.info.vocab_size)
            stats, drive = self._rounds.stats, None if self._background else self.step
            ticket = Ticket(stats.submitted + 1, request, tenant, self._changed, drive)
            self._line.add(ticket, None if time_limit is None else self._clock() + time_limit)
            stats.submitted += 1
            self._wake()
        return ticket

    def _require_open(self) -> None:
        if self._closed:
            raise GenerationError("engine", "is closed", "make another one")

    def _wake(self) -> None:
        """Let the thread look; start it for the first time."""
        if self._background and self._thread is None:
            self._thread = Thread(target=self._serve, name="dsc-engine", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def resize(self, max_length: int) -> None:
        """Change the most tokens that a request may have, prompt and output together.

        A smaller length holds for requests that come from now on; those that run or wait keep what they were promised,
        and the memory goes when the last of them has ended. A larger one holds when its memory is there.

        Raises:
            RequestError: it is no whole number above 0.
            PlanError: it is more than the bundle was compiled for.
            GenerationError: the engine is closed.
        """
        with self._changed:
            self._require_open()
            self._rounds.length.ask(whole_number(max_length, "max_length", 1))
            self._wake()
        if not self._background:
            self.step()

    def run(self) -> None:
        """Run rounds until nothing is left to do, for an engine without a thread."""
        while self.step():
            pass

    def drain(self) -> None:
        """Wait until nothing is left to do."""
        if not self._background:
            self.run()
        with self._changed:
            self._changed.wait_for(lambda: self._idle)

    def close(self) -> None:
        """Cancel what is left and stop."""
        with self._changed:
            self._closed = True
            for ticket in (*self._line.tickets(), *(running.ticket for running in self._rounds.running)):
                ticket.cancelled = True
            self._changed.notify_all()
        if self._thread is None:
            self.run()
        else:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the requests, or cancel them when an error leaves the block."""
        if kind is None:
            self.drain()
        self.close()

    def stats(self) -> dict[str, Any]:
        """Counters of the engine, its queue and its cache, as plain values."""
        counts = asdict(self._rounds.stats)
        now = {"running": len(self._rounds.running), "waiting": len(self._line)}
        return counts | now | {"max_length": self._rounds.length.limit, "cache": self._rounds.report()}

    @property
    def _idle(self) -> bool:
        return self._rounds.stats.ended == self._rounds.stats.submitted

    def _serve(self) -> None:
        """The thread: rounds while there is something to do."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._rounds.length.asked or not self._idle)
                if self._closed and self._idle:
                    return
            try:
                self.step()
            except Exception as error:
                self._give_up(error)

    def step(self) -> bool:
        """One round; returns whether there may be more to do."""
        with self._stepping:
            now = self._clock()
            self._rounds.end_early(now)
            self._expire(now)
            with self._changed:
                self._rounds.length.follow([ticket.request for ticket in self._line.tickets()])
            while self._rounds.has_room and (entry := self._next()) is not None:
                self._rounds.join(*entry)
                # `close` cancels what waits and what runs; this one was neither for a moment.
                entry[0].cancelled |= self._closed
            self._rounds.round()
        with self._changed:
            self._changed.notify_all()
            return not self._idle

    def _next(self) -> tuple[Ticket, float | None] | None:
        with self._changed:
            return self._line.next()

    def _expire(self, now: float) -> None:
        """End requests that were cancelled, or whose time is over, before they had a slot."""
        with self._changed:
            ended = self._line.expire(now)
        for ticket in ended:
            what = "was cancelled" if ticket.cancelled else "ran out of time"
            ticket.finish(None, GenerationError(f"request {ticket.number}", f"{what} before it had a slot"))
            self._rounds.stats.count_end("cancelled" if ticket.cancelled else "time")

    def _give_up(self, error: Exception) -> None:
        """The pool itself is not sound: every request fails, and the engine closes."""
        with self._changed:
            self._closed = True
            waiting = self._line.clear()
        self._rounds.fail_all(error)
        for ticket in waiting:
            ticket.finish(None, error)
            self._rounds.stats.failed += 1
        with self._changed:
            self._changed.notify_all()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
