"""Ways of drafting. Each proposes what may follow; the target alone decides what does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from dsc.bundle_schema.dflash_config import ProposerKind
from dsc.runtime.cached_model import CachedModel
from dsc.runtime.draft_reading import DraftReading
from dsc.runtime.ngram import Match, NgramIndex, continuation

RowWatcher = Callable[[NDArray[np.float32]], None]

LATE = "late"
# Of drafts that would have held. SmolLM2-135M's int4 weights for its fp32 ones: 0.62 on edits and summaries to 0.77 on
# quotations; the lower end, as a late start stakes its reading.
_LATE_SHARE = 0.6

_LENGTHS = ((16, "16+"), (8, "8-15"), (4, "4-7"))


class Proposer(Protocol):
    """Drafts tokens for one sequence.

    Attributes:
        kind: its row in the configuration's table, and its name in options and statistics.
        reads: it reads the text itself before it drafts, which a request has to pay for before it has earned anything.
        sizes_blocks: what it proposes differs so much in quality that a fixed window is never right.
        watch: sees each row [V] of its logits, where it computes any.
        adaptive_rollback: keep what it has read of the drafts that held, after a rejection.
        left: plain steps that its last request left it to lose; None before the first, and where each starts anew.
    """

    kind: ProposerKind
    reads: bool
    sizes_blocks: bool
    watch: RowWatcher | None
    adaptive_rollback: bool
    left: float | None

    def look(self, tokens: Sequence[int]) -> str | None:
        """The kind of proposal that can be made after `tokens`, None when there is none; cheap.

        Acceptance is learnt for each kind apart.
        """

    def silence(self, tokens: Sequence[int]) -> str:
        """Why there is no proposal after `tokens`, as the statistics count it, when `look` found none."""

    def room(self, tokens: Sequence[int]) -> int:
        """Most drafts that this proposer's own limits allow."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` drafts to follow `tokens`, after `look` said that there is something to propose."""

    def rewind(self, length: int) -> None:
        """Only the first `length` tokens of the sequence are still the same."""

    def prior(self, kind: str) -> tuple[float, float]:
        """Acceptance of the first and of later drafts of `kind` to expect before any was seen."""

    def lag(self, tokens: Sequence[int], start: int | None = None) -> int:
        """Tokens that must be read before the first draft can be made, the last one not counted; those from `start` on
        if it were to start reading there.
        """

    def starts(self, tokens: Sequence[int], generated: int) -> tuple[int, ...]:
        """Places of the sequence at which its reading could start, the present one first; empty when it never reads.
        The last `generated` tokens are output.
        """

    def begin(self, start: int) -> None:
        """Start reading at one of those places."""

    def kind_from(self, start: int) -> str:
        """The kind of its proposals if it were to start there."""


class Lookup:
    """A proposer that copies: it computes nothing and reads nothing."""

    reads = False
    sizes_blocks = True
    watch: RowWatcher | None = None
    adaptive_rollback = True
    left: float | None = None

    def lag(self, tokens: Sequence[int], start: int | None = None) -> int:
        """Nothing has to be read."""
        return 0

    def starts(self, tokens: Sequence[int], generated: int) -> tuple[int, ...]:
        """It does not read."""
        return ()

    def begin(self, start: int) -> None:
        """Never asked."""

    def kind_from(self, start: int) -> str:
        """Never asked."""
        return ""


class NgramProposer(Lookup):
    """Prompt lookup: what followed where the sequence looked before as its end looks now (Saxena 2023).

    Longer matches hold more often, and so do those whose occurrences agree on what follows. The kind says both: the
    match length ``1``, ``2``, ``3``, ``4-7``, ``8-15``, ``16+`` and whether it was the ``only`` occurrence, or one of
    several of which ``all``, ``most`` (half or more) or ``few`` had the same token next.
    """

    kind: ProposerKind = "ngram"
    # First and later acceptance, from greedy answers of SmolLM2-135M to half of the benchmark's prompts.
    _PRIORS: ClassVar[dict[str, tuple[float, float]]] = {
        "1 only": (0.28, 0.7), "1 all": (0.33, 0.67), "1 most": (0.2, 0.56), "1 few": (0.1, 0.6),
        "2 only": (0.5, 0.8), "2 all": (0.66, 0.76), "2 most": (0.33, 0.72), "2 few": (0.17, 0.7),
        "3 only": (0.66, 0.86), "3 all": (0.74, 0.82), "3 most": (0.45, 0.85), "3 few": (0.4, 0.85),
        "4-7 only": (0.77, 0.89), "4-7 all": (0.88, 0.91), "4-7 most": (0.7, 0.89), "4-7 few": (0.63, 0.88),
        "8-15 only": (0.9, 0.91), "8-15 all": (0.96, 0.95), "8-15 most": (0.85, 0.95), "8-15 few": (0.77, 0.95),
        "16+ only": (0.94, 0.95), "16+ all": (0.99, 0.99), "16+ most": (0.96, 0.98), "16+ few": (0.92, 0.97),
    }  # fmt: skip

    def __init__(self, min_match: int = 1, max_match: int = 4) -> None:
        self.matches = (min_match, max_match)
        self._index = NgramIndex(min_match, max_match)
        self._match: Match | None = None

    def look(self, tokens: Sequence[int]) -> str | None:
        """Length and agreement of the match."""
        self._index.update(tokens)
        self._match = self._index.find(tokens)
        return None if self._match is None else _kind(self._match)

    def silence(self, tokens: Sequence[int]) -> str:
        """Nothing matched."""
        return "no proposal"

    def room(self, tokens: Sequence[int]) -> int:
        """Copies have no limit of their own."""
        return len(tokens)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Copy from the match that `look` found."""
        assert self._match is not None
        return continuation(tokens, self._match.start, count)

    def rewind(self, length: int) -> None:
        """Forget n-grams past `length`."""
        self._index.truncate(length)

    def prior(self, kind: str) -> tuple[float, float]:
        """By length and agreement."""
        return self._PRIORS[kind]


def _kind(match: Match) -> str:
    length = next((name for least, name in _LENGTHS if match.length >= least), str(match.length))
    if match.occurrences == 1:
        return f"{length} only"
    if match.agreeing == match.occurrences:
        return f"{length} all"
    return f"{length} most" if 2 * match.agreeing >= match.occurrences else f"{length} few"


class ModelProposer(DraftReading):
    """A language model drafts greedily: a smaller one, or the target's own weights at lower precision.

    Its cache holds the tokens it has read. What it drafted itself stays valid as far as the target accepted it;
    anything it has not read, because it was not asked for a while, is read before it drafts again. Proposals after a
    late start are a kind of their own, ``late``.

    Its vocabulary may be smaller than the target's. It then reads `unknown_id` for a token that it has no embedding
    for, and does not draft right after one: what follows such a token is not a question that it can answer.

    Args:
        kind: its row in the configuration's table.
        model: the draft and its cache.
        prior: acceptance of the first and of later drafts before any was seen; may be changed between requests as
            `expected`.
        n_shared: ids below this mean the same to draft and target; only they are proposed.
        vocab_size: ids below this have an embedding in the draft.
        unknown_id: read in place of any other id.

    """

    sizes_blocks = False

    def __init__(
        self,
        kind: ProposerKind,
        model: CachedModel,
        prior: tuple[float, float],
        n_shared: int,
        vocab_size: int,
        unknown_id: int = 0,
    ) -> None:
        self.kind = kind
        self.reads = model.reads
        self.longest = model.max_length
        self._model = model
        self.expected = prior
        self._n_shared = n_shared
        self._vocab_size = vocab_size
        self._unknown_id = unknown_id
        self.watch: RowWatcher | None = None
        self.left: float | None = None

    def look(self, tokens: Sequence[int]) -> str | None:
        """A model has a proposal unless the sequence is longer than it can read or ends in an unknown token."""
        return None if self.silence(tokens) else self.kind_from(self.start)

    def silence(self, tokens: Sequence[int]) -> str:
        """Its context is full, or it does not know the last token."""
        if self.room(tokens) < 1:
            return "draft context full"
        return "" if tokens[-1] < self._vocab_size else "token unknown to the draft"

    def room(self, tokens: Sequence[int]) -> int:
        """Its context must hold the sequence and all drafts but the last."""
        return max(self.longest - (len(tokens) - self.start) + 1, 0)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Read what is new, then take the most likely shared token `count` times."""
        model = self._model
        self.note_drafts(tokens, count)
        rows = model.read_whole_chunks(self._readable(tokens[self.start + model.length :]))
        return model.draft(rows, count, self._n_shared, self.watch)

    def _readable(self, tokens: Sequence[int]) -> list[int]:
        return [token if token < self._vocab_size else self._unknown_id for token in tokens]

    @property
    def n_read(self) -> int:
        """Rows of its cache."""
        return self._model.length

    def forget(self, n_kept: int) -> None:
        """Drop the later rows."""
        self._model.rewind(n_kept)

    def kind_from(self, start: int) -> str:
        """Late or not."""
        return LATE if start else self.kind

    def prior(self, kind: str) -> tuple[float, float]:
        """`expected`, and less where it has not read the beginning of the text."""
        return model_prior(self.expected, kind)


def model_prior(prior: tuple[float, float], kind: str) -> tuple[float, float]:
    """Acceptance to expect of a draft model with this `prior` where it has read the whole text."""
    first, later = prior
    return (_LATE_SHARE * first, _LATE_SHARE * later) if kind == LATE else prior
