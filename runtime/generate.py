"""`SpeculativeModel`: a loaded bundle that generates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

from dsc.bundle_schema.certificate import Certificate
from dsc.bundle_schema.dflash_config import DflashConfig
from dsc.bundle_schema.errors import GenerationError, RequestError
from dsc.bundle_schema.manifest import Manifest
from dsc.runtime import arguments
from dsc.runtime.cached_model import CachedModel
from dsc.runtime.conversation import Conversation
from dsc.runtime.decode import Decoding, LogitsHook
from dsc.runtime.device_arena import DeviceArena
from dsc.runtime.device_verify import DeviceTail
from dsc.runtime.engine import Engine
from dsc.runtime.host import SessionSettings
from dsc.runtime.kv_arena import KvArena
from dsc.runtime.model_id import model_id
from dsc.runtime.prefix_cache import PrefixCache
from dsc.runtime.recall import recall
from dsc.runtime.request import (
    Chunk,
    GenerationResult,
    Message,
    Prompt,
    Request,
    chat_messages,
    check_prompt,
    token_limit,
)
from dsc.runtime.sampling import SamplingParams, sampling_params
from dsc.runtime.schedule_setup import Scheduler
from dsc.runtime.speculator import SpeculationRequest, speculation_options
from dsc.runtime.start import start_decoding
from dsc.runtime.stats import GenerationStats
from dsc.runtime.stream import GenerationStream
from dsc.runtime.text import TextCodec
from dsc.runtime.trace import TraceTarget, TraceWriter, trace_target


@dataclass(frozen=True)
class LoadedBundle:
    """A bundle's facts and the parts that run it; made by `dsc.runtime.load.load`."""

    manifest: Manifest
    config: DflashConfig
    certificate: Certificate
    arena: KvArena | DeviceArena
    settings: SessionSettings
    tail: DeviceTail | None
    target: CachedModel
    draft: CachedModel | None
    draft_failure: str
    profile: str
    codec: TextCodec | None
    max_length: int
    override: Path | None = None


class SpeculativeModel:
    """A target model, its draft and one cache, ready to generate.

    One generation runs at a time; calls from other threads wait for it, and a stream holds the model until it ends or
    is closed. `agenerate` and `astream` do the same without blocking the event loop.
    """

    def __init__(self, bundle: LoadedBundle) -> None:
        self.bundle = bundle
        self.max_length = bundle.max_length
        self._lock = Lock()
        self._waiting = ThreadPoolExecutor(1, "dsc-generate")
        self._holder: int | None = None
        self._task_streams: WeakKeyDictionary[Any, list[asyncio.Task[Any] | None]] = WeakKeyDictionary()
        self._cached: list[int] = []
        self.prefixes = PrefixCache(bundle.config.cache.prefix_max_nbytes)
        self.scheduler = Scheduler(
            bundle.manifest, bundle.config, bundle.override, bundle.settings, bundle.draft, bundle.draft_failure
        )

    @property
    def proposers(self) -> tuple[str, ...]:
        """The proposers that the bundle offers."""
        return self.scheduler.offered

    @property
    def config(self) -> DflashConfig:
        """The schedule in force: the bundle's, with what was changed since."""
        return self.scheduler.live.current

    def update_config(self, changes: Mapping[str, Any]) -> None:
        """Change the schedule, from the next round on, also of a generation that runs; what proposers match and are
        expected to get right, from the next request on.

        Args:
            changes: dotted path -> value, e.g. ``{"windows.max": 6, "policy": "rules"}``.

        Raises:
            ConfigError: names the field and says why; nothing has changed.
        """
        self.scheduler.update(changes)

    def save_continuations(self, path: Path | str) -> None:
        """Write the known continuations to a file.

        Raises:
            HostError: it cannot be written.
        """
        with self.exclusive():
            self.scheduler.continuations.save(arguments.file_path(path, "path"), model_id(self.bundle.manifest).digest)

    def load_continuations(self, path: Path | str) -> int:
        """Add the continuations of a file, and return how many it had.

        Raises:
            RequestError: the file is missing, damaged, or of another model; nothing was added.
        """
        manifest = self.bundle.manifest
        with self.exclusive():
            return self.scheduler.continuations.load(
                arguments.file_path(path, "path"), model_id(manifest).digest, manifest.target.info.vocab_size
            )

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | dict[str, Any] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        speculation: SpeculationRequest = "auto",
        processors: Sequence[LogitsHook] = (),
        trace: TraceTarget | None = None,
        reuse_cache: bool | None = None,
    ) -> GenerationResult:
        """Generate to the end.

        Args:
            prompt: text, token ids, or chat messages, which go through the bundle's template.
            max_new_tokens: as many as fit when None.
            sampling: greedy when None.
            seed: of `sampling`, for short.
            stop: texts that end the output.
            stop_tokens: tokens that end it, besides the model's own.
            ignore_eos: do not end at the model's own end tokens.
            speculation: ``auto`` is what the bundle is configured for, ``off`` plain decoding; options otherwise.
            processors: change the logits of each block before they are judged.
            trace: path or text file that gets a JSON line a round.
            reuse_cache: do not read again what the live cache or a saved text holds of the prompt; as the configuration
                says when None.

        Raises:
            RequestError: an argument is wrong.
            GenerationError: the prompt does not fit, or the calling thread has an open stream of this model.
        """
        return self.stream(
            prompt,
            max_new_tokens,
            sampling,
            seed,
            stop,
            stop_tokens,
            ignore_eos,
            speculation,
            processors,
            reuse_cache,
            trace,
        ).finish()

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | dict[str, Any] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        speculation: SpeculationRequest = "auto",
        processors: Sequence[LogitsHook] = (),
        reuse_cache: bool | None = None,
        trace: TraceTarget | None = None,
    ) -> GenerationStream:
        """Like `generate`, as an iterator of chunks; its `result` is there when it has ended.

        Args:
            reuse_cache: see `generate`.
        """
        vocab_size = self.bundle.manifest.target.info.vocab_size
        ids = check_prompt(self.encode(prompt), vocab_size, self.max_length)
        stop_strings = arguments.stop_texts(stop)
        if stop_strings and self.bundle.codec is None:
            raise RequestError("stop", "stop strings need a tokenizer, the bundle has none", "use stop_tokens")
        eos = () if arguments.flag(ignore_eos, "ignore_eos") else self.bundle.manifest.target.info.eos_ids
        request = Request(
            ids=ids,
            max_tokens=token_limit(len(ids), max_new_tokens, self.max_length),
            sampling=sampling_params(sampling, seed, vocab_size),
            stop_ids=frozenset((*eos, *arguments.stop_tokens(stop_tokens, vocab_size))),
            stop_strings=stop_strings,
            speculation=speculation_options(speculation),
            processors=arguments.callables(processors, "processors"),
            reuse_cache=None if reuse_cache is None else arguments.flag(reuse_cache, "reuse_cache"),
            trace=trace_target(trace),
        )
        self.scheduler.check(request.speculation)
        return GenerationStream(self, request)

    async def agenerate(self, prompt: Prompt, **options: Any) -> GenerationResult:
        """`generate` without blocking the event loop; takes the same arguments."""
        self._refuse_reentry()
        call = partial(self.generate, prompt, **options)
        return await asyncio.get_running_loop().run_in_executor(self._waiting, call)

    def astream(self, prompt: Prompt, **options: Any) -> AsyncGenerator[Chunk, None]:
        """`stream` without blocking the event loop; takes the same arguments."""
        holders: list[asyncio.Task[Any] | None] = []
        chunks = self._chunks(self.stream(prompt, **options), holders)
        self._task_streams[chunks] = holders  # weakly: a loop that was left by `break` holds nothing any more
        return chunks

    async def _chunks(
        self, stream: GenerationStream, holders: list[asyncio.Task[Any] | None]
    ) -> AsyncGenerator[Chunk, None]:
        self._refuse_reentry()
        loop = asyncio.get_running_loop()
        # A thread of its own: streams must go on while other calls wait for the model in the shared one.
        with ThreadPoolExecutor(1, "dsc-stream") as thread:
            try:
                while (chunk := await loop.run_in_executor(thread, next, stream, None)) is not None:
                    holders[:] = [asyncio.current_task()]
                    yield chunk
            finally:
                holders.clear()
                await loop.run_in_executor(thread, stream.close)

    def engine(self, slots: int = 4, **options: Any) -> Engine:
        """An engine that runs many requests at once over this model; `options` are those of `Engine`."""
        return Engine(self, slots, **options)

    def conversation(self, messages: Sequence[Message] = ()) -> Conversation:
        """A chat that keeps its turns; what the cache holds of it is not read again."""
        return Conversation(self, messages)

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt: text, messages through the chat template, or ids as they are.

        Raises:
            RequestError: it is none of them, or the bundle has no tokenizer.
            GenerationError: the template refuses the messages.
        """
        messages = chat_messages(prompt)
        if not isinstance(prompt, str) and messages is None:
            return arguments.token_ids(prompt, "prompt")
        if self.bundle.codec is None:
            raise RequestError("prompt", "text needs a tokenizer, the bundle has none", "give token ids")
        return self.bundle.codec.encode(prompt) if isinstance(prompt, str) else self.bundle.codec.chat(messages or [])

    def reset(self) -> None:
        """Forget what the caches hold; the next generation starts as after loading."""
        with self.exclusive():
            self._rewind(0)
            self._cached = []
            self.scheduler.reset()
            self.prefixes.clear()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the model.

        Raises:
            GenerationError: this thread or task holds it already, by a stream that has not ended.
        """
        self._refuse_reentry()
        with self._lock:
            self._holder = get_ident()
            try:
                yield
            finally:
                self._holder = None

    def _refuse_reentry(self) -> None:
        """Raise where waiting for the model would be waiting for oneself."""
        task = _running_task()
        holders = [holder for stream in self._task_streams.values() for holder in stream]
        if self._holder == get_ident() or (task is not None and task in holders):
            raise GenerationError("model", "this thread or task has an open stream", "end or close it first")

    def begin(self, request: Request, stats: GenerationStats, trace: TraceWriter | None) -> Decoding:
        """A decoding over the caches; the caller holds the model."""
        self.bundle.arena.check_guards()
        self._recall(request, stats)
        self._cached = tokens = list(request.ids)
        run = start_decoding(self.bundle, self.scheduler, request, tokens, stats, trace)
        self._relieve(stats.memory_pressure)
        return run

    def _recall(self, request: Request, stats: GenerationStats) -> None:
        """Leave in the caches what they, or a saved text, hold of the prompt."""
        zones = {model.zone.owner: model.zone for model in (self.bundle.target, self.bundle.draft) if model is not None}
        recall(self.prefixes, self.config, request, stats, self._cached, zones, self._rewind)

    def _relieve(self, pressed: bool) -> None:
        """Under memory pressure give back what can be made again; journal only without it."""
        bundle = self.bundle
        for model in (bundle.target, bundle.draft):
            if model is not None:
                model.zone.journals = not pressed
        if not pressed:
            return
        self.prefixes.configure(0)
        if bundle.draft is not None and bundle.draft.reads and isinstance(bundle.arena, KvArena):
            bundle.draft.rewind(0)
            bundle.arena.release("draft", 0, 0)

    def _rewind(self, length: int) -> None:
        self.bundle.target.rewind(length)
        self.scheduler.rewind(length)


def _running_task() -> asyncio.Task[Any] | None:
    """The task that calls, None outside an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
