"""The rounds of an engine: sequences join and leave between them, and share the target's forward in them.

A round is one forward of the target for the rows of all sequences: the last token and the drafts of those that decode,
pieces of the prompts of those that have just come. Everything else in a round is each sequence's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dsc.bundle_schema.errors import DscError, HostError
from dsc.bundle_schema.kv_layout import MAX_SLOTS, resized
from dsc.runtime.acceptance import RoundCosts
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
from dsc.runtime.request import FinishReason
from dsc.runtime.session import ForwardSession
from dsc.runtime.shared_draft import SharedDraft
from dsc.runtime.shared_round import admitted_windows, fair_shares, prompt_rows
from dsc.runtime.speculator import Intent
from dsc.runtime.start import start_decoding
from dsc.runtime.ticket import Ticket
from dsc.runtime.trace import open_trace

if TYPE_CHECKING:
    from dsc.runtime.generate import SpeculativeModel


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

    def count_end(self, reason: FinishReason) -> None:
        """A request has ended, not by an error."""
        self.cancelled += reason == "cancelled"
        self.out_of_time += reason == "time"
        self.finished += reason in ("stop", "length")

    @property
    def ended(self) -> int:
        """Requests that are over."""
        return self.finished + self.cancelled + self.out_of_time + self.failed


class Rounds:
    """The sequences that run, over the slots of one KV pool. One thread at a time.

    Args:
        slots: sequences that run at once.
        stretch: how much longer a round may take because prompts are read beside it.

    Attributes:
        length: the most tokens of a request, and how that changes.

    Raises:
        HostError: the model runs on a device, where rows are not packed.
        RequestError: `slots` is out of range.
    """

    def __init__(self, model: SpeculativeModel, slots: int, stretch: float) -> None:
        bundle = model.bundle
        if not isinstance(bundle.arena, KvArena) or not isinstance(bundle.target.session, ForwardSession):
            raise HostError("engine", "the CPU is required for now", "load with provider='cpu'")
        plan = resized(bundle.arena.plan, model.max_length, whole_number(slots, "slots", 1, MAX_SLOTS))
        self._model = model
        self._pool = KvSlots(KvArena(plan, bundle.config.secure_rollback), model.max_length)
        self._health = CacheHealth(self._pool, bundle.config.health)
        self.length = EngineLength(self._pool, self._health.repairs)
        self._prefixes = PrefixCache(bundle.config.cache.prefix_max_nbytes)
        self._target = SlotGraph(bundle.target.session, self._pool, "target")
        draft = bundle.draft.session if bundle.draft is not None else None
        self._draft = SlotGraph(draft, self._pool, "draft") if isinstance(draft, ForwardSession) else None
        reason = why_apart(bundle.target.session, bundle.settings.kernels)
        self._forward = TargetForward(self._target, self._pool, reason)
        self._stretch = stretch
        self.running: list[Running] = []
        self.stats = EngineStats(forward=reason)

    @property
    def has_room(self) -> bool:
        """A slot is free."""
        return self._pool.n_live < self._pool.n_slots

    def report(self) -> dict[str, Any]:
        """The cache's health."""
        return self._health.report()

    def join(self, ticket: Ticket, deadline: float | None) -> None:
        """Give a request a free slot."""
        sequence = self._pool.allocate(ticket.request.max_tokens)
        assert sequence is not None
        closing = ExitStack()
        try:
            generation = self._start(ticket, sequence, closing)
        except Exception as error:
            with suppress(DscError):
                closing.close()
            self._pool.free(sequence)
            self._fail(ticket, error)
        else:
            self.running.append(Running(sequence, ticket, generation, deadline, closing))

    def _start(self, ticket: Ticket, sequence: int, closing: ExitStack) -> Generation:
        bundle, pool = self._model.bundle, self._pool
        target = CachedModel(SlotForward(self._target, sequence), pool.zone(sequence, "target"), bundle.max_length)
        draft = None
        if self._draft is not None and bundle.draft is not None:
            forward, longest = SlotForward(self._draft, sequence), bundle.draft.max_length
            if bundle.draft.reads:
                draft = CachedModel(forward, pool.zone(sequence, "draft"), longest)
            else:
                draft = SharedDraft(forward, target, longest)
        own = replace(bundle, target=target, draft=draft)
        request, stats = ticket.request, ticket.stats
        trace = closing.enter_context(open_trace(request.trace))
        recall(self._prefixes, self._model.config, request, stats, (), self._zones(sequence), lambda length: None)
        scheduler = self._model.scheduler.for_sequence(draft)
        run = start_decoding(own, scheduler, request, list(request.ids), stats, trace)
        stats.sharing = self._forward.reason or "packed rows"
        return Generation(run, request, bundle.codec, ticket.started)

    def end_early(self, now: float) -> None:
        """End requests that were cancelled or whose time is over."""
        for running in list(self.running):
            if (reason := running.why_end(now)) is not None:
                with self._own_errors(running):
                    running.ticket.push(running.generation.end(reason))
                    self._leave(running)

    def fail_all(self, error: Exception) -> None:
        """End every request with an error."""
        for running in list(self.running):
            self._drop(running)
            self._fail(running.ticket, error)

    def round(self) -> None:
        """One round of all that run, if any do.

        Raises:
            PlanError: something wrote past the end of the cache; no output is to be trusted then.
        """
        if self.running:
            self._run()
            self._health.config = self._model.config.health
            self._health.scan()
        if not self.running:
            self._health.repairs.continue_resize()  # nobody waits for it

    def _run(self) -> None:
        turns, blocks = self._plan()
        started = perf_counter()
        found = self._forward.run([turn for _, turn in turns])
        self._count(turns)
        ms = (perf_counter() - started) * 1000
        for (running, turn), logits in zip(turns, found, strict=True):
            with self._own_errors(running):
                if isinstance(logits, DscError):
                    raise logits
                self._book(running, len(turns), ms)
                self._conclude(running, turn, blocks.get(running.sequence), logits)

    def _plan(self) -> tuple[list[tuple[Running, Turn]], dict[int, Block]]:
        """Who reads what in this round; blocks by sequence."""
        decoding = [running for running in self.running if running.decodes]
        costs = self._costs_of(decoding or self.running)
        turns, blocks = self._read_prompts(costs, len(decoding))
        intents: list[tuple[Running, Intent]] = []
        for running in decoding:
            with self._own_errors(running):
                intents.append((running, running.consider()))
        rows = len(intents) + sum(len(turn.tokens) for _, turn in turns)
        windows = self._windows([intent for _, intent in intents], costs, rows)
        for (running, intent), window in zip(intents, windows, strict=True):
            with self._own_errors(running):
                turn, blocks[running.sequence] = running.draft(intent, window)
                turns.append((running, turn))
        return turns, blocks

    def _read_prompts(self, costs: RoundCosts, decoding: int) -> tuple[list[tuple[Running, Turn]], dict[int, Block]]:
        """The pieces of prompts; blocks of the last ones, which give a first token."""
        turns: list[tuple[Running, Turn]] = []
        blocks: dict[int, Block] = {}
        reading = [running for running in self.running if not running.decodes]
        if not reading:
            return turns, blocks
        budget = prompt_rows(costs, self._costs_of(reading), decoding, self._stretch, self._target.chunk)
        for running, share in zip(reading, fair_shares([one.n_unread for one in reading], budget), strict=True):
            if share:
                turn, block = running.read(share)
                turns.append((running, turn))
                blocks |= {running.sequence: block} if block is not None else {}
        return turns, blocks

    def _costs_of(self, sequences: list[Running]) -> RoundCosts:
        """What rows cost behind as much context as the longest of these has read."""
        return self._model.scheduler.row_costs(max(one.generation.run.target.length for one in sequences))

    def _windows(self, intents: list[Intent], costs: RoundCosts, rows: int) -> list[int]:
        """Drafts of each sequence: as intended where one is alone, otherwise weighed together."""
        config = self._model.config
        lanes = config.batched if config.policy == "batched" else None
        if len(intents) > 1 or (intents and (lanes is not None or rows > 1)):
            return admitted_windows(intents, costs, rows, lanes)
        return [intent.window for intent in intents]

    def _count(self, turns: list[tuple[Running, Turn]]) -> None:
        stats = self.stats
        stats.rounds += 1
        stats.rows += sum(len(turn.tokens) for _, turn in turns)
        stats.prompt_rows += sum(len(turn.tokens) for running, turn in turns if not running.decodes)
        stats.most_sequences = max(stats.most_sequences, len(turns))
        stats.forwards, stats.split_rounds = self._forward.runs, self._forward.split

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
            if running in self.running:
                self._drop(running)
            self._fail(running.ticket, error)

    def _leave(self, running: Running) -> None:
        """A request has its result."""
        result, run = running.generation.result, running.generation.run
        assert result is not None
        if reuses(running.ticket.request, self._model.config):
            self._prefixes.save(run.tokens, self._zones(running.sequence))
        self._release(running)
        self._model.scheduler.remember(run.tokens, run.n_prompt, run.cuts)
        running.ticket.finish(result)
        self.stats.count_end(result.finish_reason)

    def _zones(self, sequence: int) -> Zones:
        return {owner: self._pool.zone(sequence, owner) for owner in self._pool.owners}

    def _release(self, running: Running) -> None:
        """Raises RequestError where a trace cannot be written to its end."""
        self.running.remove(running)
        self._pool.free(running.sequence)
        running.closing.close()

    def _drop(self, running: Running) -> None:
        """Release a request that has failed already."""
        with suppress(DscError):
            self._release(running)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        ticket.finish(None, error)
        self.stats.failed += 1
