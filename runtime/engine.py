"""An engine: many requests at once over one model, each with the output that it would have alone.

Requests wait in line for a slot of the KV pool, join and leave between rounds. A round is one forward of the target for
the rows of all sequences: the last token and the drafts of those that decode, pieces of the prompts of those that have
just come. Everything else in a round is each sequence's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from threading import Condition, Thread
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dsc.bundle_schema.errors import DscError, GenerationError, HostError, RequestError
from dsc.bundle_schema.kv_layout import resized
from dsc.runtime.arguments import whole_number
from dsc.runtime.cache_health import CacheHealth
from dsc.runtime.cached_model import CachedModel
from dsc.runtime.decode import Block, conclude
from dsc.runtime.engine_length import EngineLength
from dsc.runtime.engine_request import Running
from dsc.runtime.generation import Generation
from dsc.runtime.kv_arena import KvArena
from dsc.runtime.kv_slots import KvSlots
from dsc.runtime.packed_forward import Logits, SlotForward, SlotGraph, TargetForward, Turn, why_apart
from dsc.runtime.prefix_cache import PrefixCache, Zones
from dsc.runtime.recall import recall, reuses
from dsc.runtime.request import FinishReason, Prompt
from dsc.runtime.session import ForwardSession
from dsc.runtime.shared_round import admitted_windows, fair_shares, prompt_rows
from dsc.runtime.speculator import Intent
from dsc.runtime.start import start_decoding
from dsc.runtime.tenants import cap_request, tenant_cap
from dsc.runtime.ticket import Ticket
from dsc.runtime.trace import open_trace
from dsc.runtime.waiting_line import WaitingLine

if TYPE_CHECKING:
    from dsc.runtime.generate import SpeculativeModel

PREFILL_STRETCH = 2.0
"""How much longer a round may take because prompts are read beside it."""


@dataclass
class EngineStats:
    """What an engine did.

    Attributes:
        forward: empty when the sequences of a round share a forward; otherwise why each has its own.
        rounds: rounds of the engine; `forwards` of the target took place in them.
        rows: tokens that the target read; `prompt_rows` of them of prompts.
        most_sequences: in one round.
        split_rounds: whose shared forward failed, so that each sequence ran alone.
    """

    forward: str = ""
    rounds: int = 0
    forwards: int = 0
    rows: int = 0
    prompt_rows: int = 0
    most_sequences: int = 0
    split_rounds: int = 0
    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    out_of_time: int = 0
    failed: int = 0


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
        bundle = model.bundle
        if not isinstance(bundle.arena, KvArena) or not isinstance(bundle.target.session, ForwardSession):
            raise HostError("engine", "the CPU is required for now", "load with provider='cpu'")
        if prefill_stretch < 1:
            raise RequestError("prefill_stretch", f"at least 1 is required, got {prefill_stretch}")
        plan = resized(bundle.arena.plan, model.max_length, whole_number(slots, "slots", 1, 256))
        self._model = model
        self._pool = KvSlots(KvArena(plan, bundle.config.secure_rollback), model.max_length)
        self._health = CacheHealth(self._pool, bundle.config.health)
        self._length = EngineLength(self._pool, self._health.repairs)
        self._prefixes = PrefixCache(bundle.config.cache.prefix_max_nbytes)
        self._target = SlotGraph(bundle.target.session, self._pool, "target")
        draft = bundle.draft.session if bundle.draft is not None else None
        self._draft = SlotGraph(draft, self._pool, "draft") if isinstance(draft, ForwardSession) else None
        reason = why_apart(bundle.target.session, bundle.settings.kernels)
        self._forward = TargetForward(self._target, self._pool, reason)
        self._stretch = prefill_stretch
        self._line = WaitingLine(
            whole_number(max_waiting, "max_waiting", 1), lambda tenant: tenant_cap(model.config, tenant).weight
        )
        self._running: list[Running] = []
        self._changed = Condition()
        self._background = background
        self._clock = clock
        self._thread: Thread | None = None
        self._closed = False
        self._stats = EngineStats(forward=reason)

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
        request = cap_request(request, tenant_cap(self._model.config, tenant))
        if time_limit is not None and not time_limit > 0:
            raise RequestError("time_limit", f"seconds above 0 are required, got {time_limit!r}")
        with self._changed:
            if self._closed:
                raise GenerationError("engine", "is closed", "make another one")
            request = self._length.fit(request, self._model.bundle.manifest.target.info.vocab_size)
            self._stats.submitted += 1
            ticket = Ticket(
                self._stats.submitted, request, tenant, self._changed, None if self._background else self.step
            )
            self._line.add(ticket, None if time_limit is None else self._clock() + time_limit)
            self._wake()
        return ticket

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
            PlanError: it is not from 1 to what the bundle was compiled for.
        """
        with self._changed:
            self._length.ask(max_length)
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
            for ticket in (*self._line.tickets(), *(running.ticket for running in self._running)):
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
        stats = replace(self._stats, forwards=self._forward.runs, split_rounds=self._forward.split)
        waiting = len(self._line)
        now = {"running": len(self._running), "waiting": waiting, "max_length": self._length.limit}
        return asdict(stats) | now | {"cache": self._health.report()}

    @property
    def _idle(self) -> bool:
        return not self._running and not len(self._line)

    def _serve(self) -> None:
        """The thread: rounds while there is something to do."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._length.asked or not self._idle)
                if self._closed and self._idle:
                    return
            try:
                self.step()
            except Exception as error:
                self._give_up(error)

    def step(self) -> bool:
        """One round; returns whether there may be more to do."""
        self._end_early()
        with self._changed:
            waiting = [ticket.request for ticket in self._line.tickets()]
            self._length.follow(waiting)
        self._join()
        if self._running:
            self._round()
            self._health.config = self._model.config.health
            self._health.scan()
        if not self._running:
            self._health.repairs.continue_resize()  # nobody waits for it
        with self._changed:
            self._changed.notify_all()
            return not self._idle

    def _join(self) -> None:
        """Give free slots to those who wait."""
        while self._pool.n_live < self._pool.n_slots:
            with self._changed:
                entry = self._line.next()
                if entry is None:
                    return
                sequence = self._pool.allocate(entry[0].request.max_tokens)
                assert sequence is not None
            ticket, deadline = entry
            closing = ExitStack()
            try:
                generation = self._start(ticket, sequence, closing)
            except Exception as error:
                closing.close()
                self._pool.free(sequence)
                self._fail(ticket, error)
                continue
            self._running.append(Running(sequence, ticket, generation, deadline, closing))

    def _start(self, ticket: Ticket, sequence: int, closing: ExitStack) -> Generation:
        bundle, pool = self._model.bundle, self._pool
        target = CachedModel(SlotForward(self._target, sequence), pool.zone(sequence, "target"), bundle.max_length)
        draft = None
        if self._draft is not None and bundle.draft is not None:
            zone = pool.zone(sequence, "draft")
            draft = CachedModel(SlotForward(self._draft, sequence), zone, bundle.draft.max_length)
        own = replace(bundle, target=target, draft=draft)
        request, stats = ticket.request, ticket.stats
        trace = closing.enter_context(open_trace(request.trace))
        recall(self._prefixes, self._model.config, request, stats, (), self._zones(sequence), lambda length: None)
        scheduler = self._model.scheduler.for_sequence(draft)
        run = start_decoding(own, scheduler, request, list(request.ids), stats, trace)
        stats.sharing = self._forward.reason or "packed rows"
        return Generation(run, request, bundle.codec, ticket.started)

    def _round(self) -> None:
        turns, blocks = self._plan()
        started = perf_counter()
        found = self._forward.run([turn for _, turn in turns])
        ms = (perf_counter() - started) * 1000
        pieces = sum(len(turn.tokens) for running, turn in turns if not running.decodes)
        stats = self._stats
        stats.rounds += 1
        stats.rows += sum(len(turn.tokens) for _, turn in turns)
        stats.prompt_rows += pieces
        stats.most_sequences = max(stats.most_sequences, len(turns))
        for (running, turn), logits in zip(turns, found, strict=True):
            with self._own_errors(running):
                if isinstance(logits, DscError):
                    raise logits
                self._book(running, len(turns), ms)
                self._conclude(running, turn, blocks.get(running.sequence), logits)

    def _plan(self) -> tuple[list[tuple[Running, Turn]], dict[int, Block]]:
        """Who reads what in this round; blocks by sequence."""
        turns: list[tuple[Running, Turn]] = []
        blocks: dict[int, Block] = {}
        config = self._model.config
        costs = self._model.scheduler.row_costs(max(len(running.generation.run.tokens) for running in self._running))
        reading = [running for running in self._running if not running.decodes]
        decoding = [running for running in self._running if running.decodes]
        budget = prompt_rows(costs, len(decoding), self._stretch, self._target.chunk)
        shares = fair_shares([running.n_unread for running in reading], budget)
        for running, share in zip(reading, shares, strict=True):
            if share:
                turn, block = running.read(share)
                turns.append((running, turn))
                blocks |= {running.sequence: block} if block is not None else {}
        intents: list[tuple[Running, Intent]] = []
        for running in decoding:
            with self._own_errors(running):
                intents.append((running, running.consider()))
        rows = len(intents) + sum(len(turn.tokens) for _, turn in turns)
        lanes = config.batched if config.policy == "batched" else None
        windows = [intent.window for _, intent in intents]
        if len(intents) > 1 or lanes is not None:
            windows = admitted_windows([intent for _, intent in intents], costs, rows, lanes)
        for (running, intent), window in zip(intents, windows, strict=True):
            with self._own_errors(running):
                turn, blocks[running.sequence] = running.draft(intent, window)
                turns.append((running, turn))
        return turns, blocks

    @staticmethod
    def _book(running: Running, n_turns: int, ms: float) -> None:
        """The time of the forward, under a name of its own where it was not this sequence's alone."""
        spent = running.ticket.stats.ms
        name = "prefill" if not running.decodes else "forward" if n_turns == 1 else "shared"
        spent[name] = spent.get(name, 0.0) + ms

    def _conclude(self, running: Running, turn: Turn, block: Block | None, logits: Logits) -> None:
        generation, run = running.generation, running.generation.run
        if block is None:
            run.target.commit(len(turn.tokens), len(turn.tokens))
            return
        running.ticket.push(generation.take(conclude(run, block, logits)))
        if generation.result is None and len(run.tokens) >= run.max_tokens:
            running.ticket.push(generation.end("length"))
        if generation.result is not None:
            self._leave(running)

    @contextmanager
    def _own_errors(self, running: Running) -> Iterator[None]:
        """Whatever one request raises ends that request, and only that."""
        try:
            yield
        except Exception as error:
            if running in self._running:
                self._running.remove(running)
                self._release(running)
            self._fail(running.ticket, error)

    def _end_early(self) -> None:
        """Requests that were cancelled or whose time is over."""
        now = self._clock()
        for running in list(self._running):
            if (reason := running.why_end(now)) is not None:
                with self._own_errors(running):
                    running.ticket.push(running.generation.end(reason))
                    self._leave(running)
        with self._changed:
            ended = self._line.expire(now)
        for ticket in ended:
            self._count("cancelled" if ticket.cancelled else "time")
            what = "was cancelled" if ticket.cancelled else "ran out of time"
            ticket.finish(None, GenerationError(f"request {ticket.number}", f"{what} before it had a slot"))

    def _leave(self, running: Running) -> None:
        """A request has its result."""
        result, run = running.generation.result, running.generation.run
        assert result is not None
        self._running.remove(running)
        if reuses(running.ticket.request, self._model.config):
            self._prefixes.save(run.tokens, self._zones(running.sequence))
        self._release(running)
        self._count(result.finish_reason)
        self._model.scheduler.remember(run.tokens, run.n_prompt, run.cuts)
        running.ticket.finish(result)

    def _zones(self, sequence: int) -> Zones:
        return {owner: self._pool.zone(sequence, owner) for owner in self._pool.owners}

    def _release(self, running: Running) -> None:
        self._pool.free(running.sequence)
        running.closing.close()

    def _count(self, reason: FinishReason) -> None:
        self._stats.cancelled += reason == "cancelled"
        self._stats.out_of_time += reason == "time"
        self._stats.finished += reason in ("stop", "length")

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        self._stats.failed += 1
        ticket.finish(None, error)

    def _give_up(self, error: Exception) -> None:
        """The pool itself is not sound: every request fails, and the engine closes."""
        with self._changed:
            self._closed = True
            waiting: Sequence[Ticket] = self._line.clear()
        for running in list(self._running):
            self._running.remove(running)
            self._release(running)
            self._fail(running.ticket, error)
        for ticket in waiting:
            self._fail(ticket, error)
