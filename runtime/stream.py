"""A generation as it runs: rounds of tokens become chunks of text, and end where the request says."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dsc.runtime.decode import decode
from dsc.runtime.generation import Generation
from dsc.runtime.request import Chunk, GenerationResult, Request
from dsc.runtime.stats import GenerationStats
from dsc.runtime.trace import open_trace

if TYPE_CHECKING:
    from dsc.runtime.generate import SpeculativeModel


class GenerationStream(Iterator[Chunk]):
    """Chunks of one generation, a round each.

    The model is held from the first chunk to the last; `close`, or leaving the stream as a context manager, lets it go
    earlier. Whatever ends the stream, also an exception in a logits processor, leaves the caches usable.

    Attributes:
        request: what was asked.
        stats: counts as the generation runs.
        result: the finished generation; None before its end and after an early close.
    """

    def __init__(self, model: SpeculativeModel, request: Request) -> None:
        self.stats = GenerationStats()
        self.result: GenerationResult | None = None
        self._model = model
        self._read = True  # someone reads the chunks
        self.request = request
        self._chunks: Generator[Chunk, None, None] = self._run()

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop generating and let the model go."""
        self._chunks.close()

    def finish(self) -> GenerationResult:
        """Run to the end and return the result; an interruption between two chunks lets the model go at once."""
        self._read = False
        try:
            for _ in self:
                pass
        finally:
            self.close()
        assert self.result is not None
        return self.result

    def _run(self) -> Generator[Chunk, None, None]:
        started = perf_counter()
        with self._model.exclusive(), open_trace(self.request.trace) as trace:
            run = self._model.begin(self.request, self.stats, trace)
            generation = Generation(run, self.request, self._model.bundle.codec, started)
            for block in decode(run):
                chunk = generation.take(block, self._read)
                if generation.result is not None:
                    self._end(generation)
                yield chunk
                if self.result is not None:
                    return
            chunk = generation.end("length")
            self._end(generation)
            if chunk.text:
                yield chunk

    def _end(self, generation: Generation) -> None:
        self.result = generation.result
        self._model.scheduler.remember(generation.run.tokens, generation.run.n_prompt, generation.run.cuts)
