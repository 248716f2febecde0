"""The decoding loop: propose, run the target over the last token and the drafts, verify, commit.

Between rounds one invariant holds: the target's cache has read every token but the last. A round runs the
last token and K drafts as K + 1 rows, so its logits judge every draft and supply one token more: the correction of the
first draft that fails, or a bonus when all hold. Any proposer may draft; the output is the target's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dsc.runtime.cached_model import CachedModel
from dsc.runtime.sampling import UniformDraws
from dsc.runtime.semantic_cut import Sample
from dsc.runtime.speculator import Draft, Intent, RoundTimes, Speculator
from dsc.runtime.stats import GenerationStats, ProposerStats
from dsc.runtime.trace import TraceWriter

_NO_DRAFT = Draft()
_NO_INTENT = Intent()


class Verdict(NamedTuple):
    """What the target made of a block: the first `accepted` drafts hold, then comes `next_token`."""

    accepted: int
    next_token: int


class Verifier(Protocol):
    """Judges drafts by the target's logits so that the output has the target's own distribution."""

    def verify(self, logits: Any, drafts: Sequence[int], draws: NDArray[np.float64]) -> Verdict:
        """`logits` [K + 1, V] as the target's forward gave them, `drafts` of K tokens, `draws` [K + 1] uniform."""


class LogitsHook(Protocol):
    """Changes a block's logits in place before they are judged.

    Row i of `logits` [K + 1, V] follows ``tokens`` and the first i of ``drafts``: its exact history.
    """

    def __call__(self, logits: NDArray[np.float32], tokens: Sequence[int], drafts: Sequence[int]) -> None:
        """Edit one block."""


@dataclass
class Decoding:
    """One request while it runs.

    Attributes:
        tokens: prompt and output so far.
        target: the target model; its cache has read all of `tokens` but the last, or less before the first round.
        max_tokens: most tokens that `tokens` may reach.
        stop_ids: tokens after which nothing is wanted.
        speculator: None decodes plainly.
        hooks: applied to each block's logits in turn.
        trace: gets every round.
    """

    tokens: list[int]
    target: CachedModel
    max_tokens: int
    verifier: Verifier
    draws: UniformDraws
    stats: GenerationStats
    stop_ids: frozenset[int] = frozenset()
    speculator: Speculator | None = None
    hooks: tuple[LogitsHook, ...] = ()
    trace: TraceWriter | None = None
    n_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.tokens)

    @property
    def cuts(self) -> Sequence[int]:
        """Tokens at which the output began another topic, as far as that was looked for."""
        return self.speculator.cuts if self.speculator is not None else ()


def decode(run: Decoding) -> Iterator[list[int]]:
    """Yield the new tokens of each round until `run.max_tokens` is reached."""
    with Phase(run, "prefill"):
        run.target.read_up_to_last_chunk(run.tokens)
    while len(run.tokens) < run.max_tokens:
        yield speculative_step(run)


class Block(NamedTuple):
    """What a round asks of the target: to read what it has not read yet, and to judge drafts.

    Attributes:
        unread: the last token, or the end of the prompt in the first round.
        spent: milliseconds by phase before the round.
    """

    unread: list[int]
    draft: Draft
    spent: dict[str, float]

    @property
    def rows(self) -> list[int]:
        """The tokens of the forward."""
        return [*self.unread, *self.draft.ids]

    @property
    def n_logits(self) -> int:
        """K + 1."""
        return len(self.draft.ids) + 1

    @property
    def reads_prompt(self) -> bool:
        """It is the first round, which reads the end of the prompt."""
        return len(self.unread) > 1


def speculative_step(run: Decoding) -> list[int]:
    """One round; returns the tokens it added to `run.tokens`, at least one."""
    block = propose(run)
    with Phase(run, "prefill" if block.reads_prompt else "forward"):
        logits = run.target.forward(block.rows, block.n_logits)  # [K + 1, V]
    return conclude(run, block, logits)


def propose(run: Decoding) -> Block:
    """The round's first part: what the target shall read."""
    spent = run.stats.ms.copy()
    intent = consider(run)
    return draft(run, intent, intent.window, spent)


def consider(run: Decoding) -> Intent:
    """What the run would draft; none before its prompt is read, none past the last token that it may have."""
    if run.speculator is None or len(run.tokens) - run.target.length > 1:
        return _NO_INTENT
    with Phase(run, "propose"):
        return run.speculator.consider(run.tokens, run.max_tokens - len(run.tokens) - 1)


def draft(run: Decoding, intent: Intent, window: int, spent: dict[str, float]) -> Block:
    """What the target shall read, with at most `window` of the intended drafts, and none after a stop token.

    Args:
        spent: milliseconds by phase before `consider`.
    """
    drafts = _NO_DRAFT
    if run.speculator is not None and intent is not _NO_INTENT:
        if intent.offer is None:
            drafts = run.speculator.draft(run.tokens, intent, 0)
        else:
            with Phase(run, "propose"):
                drafts = run.speculator.draft(run.tokens, intent, window)
    stops = [i for i, token in enumerate(drafts.ids) if token in run.stop_ids]
    drafts = drafts._replace(ids=drafts.ids[: stops[0] + 1]) if stops else drafts
    return Block(run.tokens[run.target.length :], drafts, spent)


def conclude(run: Decoding, block: Block, logits: NDArray[np.float32]) -> list[int]:
    """The round's last part: judge the drafts by `logits` [K + 1, V], commit, learn; returns the new tokens."""
    draft, drafts = block.draft, block.draft.ids
    with Phase(run, "verify"):
        sample = _sample(run, logits)
        _edit_logits(run, logits, drafts)
        draws = run.draws.at(len(run.tokens), block.n_logits)  # [K + 1]
        verdict = run.verifier.verify(logits, drafts, draws)
        new = [*drafts[: verdict.accepted], verdict.next_token]
        if run.speculator is not None and run.speculator.reads_signals:
            run.speculator.see_target(logits[verdict.accepted])
    n_tokens = len(run.tokens)
    commit(run, new, written=len(block.rows))
    if run.speculator is not None and sample is not None:
        run.speculator.see_sample(run.tokens, sample[: len(new)])
    ms = {name: total - block.spent.get(name, 0.0) for name, total in run.stats.ms.items()}
    _observe(run, draft, verdict.accepted, ms)
    if run.trace is not None:
        run.trace.round(n_tokens, draft, verdict.accepted, new, ms)
    return new


def commit(run: Decoding, new: Sequence[int], written: int) -> None:
    """Add a round's tokens and restore the invariant: the caches have read all tokens but the last.

    Of the `written` rows the target keeps those whose tokens held; the draft drops what it read past them, which is
    nothing where no draft was made.
    """
    run.tokens.extend(new)
    proven = len(run.tokens) - 1
    run.target.commit(written, proven - run.target.length)
    if run.speculator is not None and written > 1:
        run.speculator.rewind(proven)


def truncate(run: Decoding, length: int) -> int:
    """Drop tokens past `length`, as when the output ended inside a block; returns how many."""
    dropped = len(run.tokens) - length
    del run.tokens[length:]
    run.target.rewind(length - 1)
    if run.speculator is not None:
        run.speculator.rewind(length - 1)
    return dropped


def _sample(run: Decoding, logits: NDArray[np.float32]) -> Sample | None:
    """What the speculator wants of a block's logits before hooks change them: what is banned or made dear says nothing
    about the text's topic. Logits on a device are not looked at.
    """
    if run.speculator is None or not isinstance(logits, np.ndarray):
        return None
    return run.speculator.sample(logits)


def _edit_logits(run: Decoding, logits: NDArray[np.float32], drafts: Sequence[int]) -> None:
    """Let the hooks change the rows whose token may be wanted: not the one that would follow a stop token."""
    if drafts and drafts[-1] in run.stop_ids:
        logits, drafts = logits[:-1], drafts[:-1]
    for hook in run.hooks:
        hook(logits, run.tokens, drafts)


def _observe(run: Decoding, draft: Draft, accepted: int, ms: dict[str, float]) -> None:
    """Book the round, and let the speculator learn from it."""
    proposed = len(draft.ids)
    run.stats.count_round(proposed, accepted)
    if run.speculator is None:
        return
    # The first round reads the end of the prompt: what it took says nothing about a round's rows.
    times = RoundTimes(proposed + 1, ms["propose"], ms["forward"] + ms["verify"]) if ms.get("forward") else None
    run.speculator.settle(proposed, accepted, times)
    if draft.reason:
        run.stats.fallbacks[draft.reason] += 1
    if proposed:
        proposer = run.stats.proposers.setdefault(draft.proposer, ProposerStats())
        proposer.rounds += 1
        proposer.proposed += proposed
        proposer.accepted += accepted
        proposer.ms += ms["propose"]


class Phase:
    """Book the time spent under a phase's name; four times a token, so no generator makes it."""

    __slots__ = ("_ms", "_name", "_start")

    def __init__(self, run: Decoding, name: str) -> None:
        self._ms = run.stats.ms
        self._name = name

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._ms[self._name] = self._ms.get(self._name, 0.0) + (perf_counter() - self._start) * 1000
