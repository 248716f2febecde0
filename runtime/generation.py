"""One request's output as its rounds come in: text, the end, the result."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from dsc.runtime.decode import Decoding, truncate
from dsc.runtime.output import Output
from dsc.runtime.request import Chunk, FinishReason, GenerationResult, Request
from dsc.runtime.text import TextCodec


class Generation:
    """Turns the rounds of a decoding into chunks and a result.

    Args:
        codec: turns tokens into text; None leaves the text empty.
        started: `perf_counter` when the request was made.

    Attributes:
        result: None before the end.
    """

    def __init__(self, run: Decoding, request: Request, codec: TextCodec | None, started: float) -> None:
        self.run = run
        self.result: GenerationResult | None = None
        self._output = Output(request.stop_ids, request.stop_strings, codec.stream() if codec else None)
        self._started = started

    def take(self, block: Sequence[int], read: bool = True) -> Chunk:
        """Add a round's tokens; the result is there when they ended the output. `read` as of `Output.take`."""
        stats = self.run.stats
        chunk = self._output.take(block, read)
        stats.first_token_ms = stats.first_token_ms or _ms_since(self._started)
        if self._output.ended:
            stats.discarded = truncate(self.run, self.run.n_prompt + len(self._output.ids))
            self._finish("stop")
        return chunk

    def end(self, reason: FinishReason) -> Chunk:
        """There will be no more rounds: the text that was held back, and the result."""
        chunk = self._output.finish()
        self._finish(reason)
        return chunk

    def _finish(self, reason: FinishReason) -> None:
        run, stats = self.run, self.run.stats
        stats.emitted = len(self._output.ids)
        stats.total_ms = _ms_since(self._started)
        stats.ms["host"] = stats.total_ms - sum(stats.ms.values())
        self.result = GenerationResult(
            text=self._output.text,
            ids=tuple(self._output.ids),
            finish_reason=reason,
            prompt_ids=tuple(run.tokens[: run.n_prompt]),
            stats=stats,
        )
        if run.trace is not None:
            run.trace.end(stats, reason)


def _ms_since(started: float) -> float:
    return (perf_counter() - started) * 1000
