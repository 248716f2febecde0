"""From a checked request to a decoding that is ready for its first round."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from dsc.runtime.decode import Decoding, LogitsHook
from dsc.runtime.judge import judge_for
from dsc.runtime.model_id import model_id
from dsc.runtime.request import Request
from dsc.runtime.sampling import LogitsEditor, UniformDraws
from dsc.runtime.schedule_setup import Scheduler
from dsc.runtime.stats import GenerationStats
from dsc.runtime.trace import TraceWriter

if TYPE_CHECKING:
    from dsc.runtime.generate import LoadedBundle


def start_decoding(
    bundle: LoadedBundle,
    scheduler: Scheduler,
    request: Request,
    tokens: list[int],
    stats: GenerationStats,
    trace: TraceWriter | None,
) -> Decoding:
    """A decoding over the caches of `bundle.target`, which hold a beginning of `tokens` or nothing.

    Args:
        scheduler: of this sequence.
        tokens: the prompt; the decoding adds to it.
    """
    sampling = request.sampling
    seed = sampling.seed if sampling.seed is not None else secrets.randbits(32)
    _describe(bundle, stats, request, None if sampling.greedy else seed)
    hooks: tuple[LogitsHook, ...] = request.processors
    if sampling.edits_logits:
        hooks = (LogitsEditor(sampling, bundle.manifest.target.info.vocab_size, len(tokens)), *hooks)
    judge = judge_for(bundle, sampling, hooks)
    stats.kernels, stats.kernels_reason = judge.kernels, judge.reason
    speculator = scheduler.speculator(request.speculation, len(tokens), stats, trace is not None)
    stats.memory_pressure = scheduler.live.pressed
    if trace is not None:
        trace.request(stats, model_id(bundle.manifest), tokens, request.max_tokens, request.stop_ids)
    return Decoding(
        tokens=tokens,
        target=judge.target,
        max_tokens=request.max_tokens,
        verifier=judge.verifier,
        draws=UniformDraws(seed),
        stats=stats,
        stop_ids=request.stop_ids,
        speculator=speculator,
        hooks=hooks,
        trace=trace,
    )


def _describe(bundle: LoadedBundle, stats: GenerationStats, request: Request, seed: int | None) -> None:
    stats.provider = bundle.settings.provider
    stats.certificate = bundle.certificate.verdict
    elsewhere = "" if stats.provider == "cpu" else " on the CPU"  # where certificates are measured
    if elsewhere or bundle.certificate.kernels != bundle.settings.kernels:
        stats.certificate += f" (measured with {bundle.certificate.kernels} kernels{elsewhere})"
    stats.profile = bundle.profile
    stats.seed = seed
    stats.prompt_tokens = len(request.ids)
    stats.cached_tokens = bundle.target.length
