"""A generation as it runs: rounds of tokens become chunks of text, and end where the request says."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dsc.runtime.decode import Decoding, decode, truncate
from dsc.runtime.output import Output
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
        stats: counts as the generation runs.
        result: the finished generation; None before its end and after an early close.
    """

    def __init__(self, model: SpeculativeModel, request: Request) -> None:
        self.stats = GenerationStats()
        self.result: GenerationResult | None = None
        self._model = model
        self._request = request
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
        """Run to the end and return the result."""
        for _ in self:
            pass
        assert self.result is not None
        return self.result

    def _run(self) -> Generator[Chunk, None, None]:
        started = perf_counter()
        codec = self._model.bundle.codec
        with self._model.exclusive(), open_trace(self._request.trace) as trace:
            run = self._model.begin(self._request, self.stats, trace)
            output = Output(self._request.stop_ids, self._request.stop_strings, codec.stream() if codec else None)
            for block in decode(run):
                chunk = output.take(block)
                self.stats.first_token_ms = self.stats.first_token_ms or _ms_since(started)
                if output.ended:
                    self.stats.discarded = truncate(run, run.n_prompt + len(output.ids))
                    self._finish(run, output, started)
                yield chunk
                if output.ended:
                    return
            chunk = output.finish()
            self._finish(run, output, started)
            if chunk.text:
                yield chunk

    def _finish(self, run: Decoding, output: Output, started: float) -> None:
        stats = self.stats
        stats.emitted = len(output.ids)
        stats.total_ms = _ms_since(started)
        stats.ms["host"] = stats.total_ms - sum(stats.ms.values())
        self.result = GenerationResult(
            text=output.text,
            ids=tuple(output.ids),
            finish_reason="stop" if output.ended else "length",
            prompt_ids=tuple(run.tokens[: run.n_prompt]),
            stats=stats,
        )
        self._model.scheduler.remember(run.tokens, run.n_prompt)
        if run.trace is not None:
            run.trace.end(stats, self.result.finish_reason)


def _ms_since(started: float) -> float:
    return (perf_counter() - started) * 1000
