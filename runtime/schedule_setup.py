"""What the scheduler keeps for a loaded model: its proposers, the configuration in force, and known continuations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from dsc.bundle_schema.dflash_config import DflashConfig, ProposerKind
from dsc.bundle_schema.errors import RequestError
from dsc.bundle_schema.manifest import Manifest
from dsc.runtime.acceptance import RoundCosts
from dsc.runtime.cached_model import CachedModel
from dsc.runtime.continuation_cache import ContinuationCache, ContinuationProposer
from dsc.runtime.costs import costs_for
from dsc.runtime.host import SessionSettings
from dsc.runtime.memory_pressure import PressureWatch
from dsc.runtime.proposers import ModelProposer, NgramProposer, Proposer
from dsc.runtime.schedule_config import LiveConfig
from dsc.runtime.schedule_costs import LiveCosts
from dsc.runtime.speculator import SpeculationOptions, Speculator
from dsc.runtime.stats import GenerationStats

_CONTEXT_STEP = 256  # tokens between contexts whose costs differ enough to look again
LOOKUPS = ("ngram", "cache")  # proposers that compute nothing
_LEAST_PRIOR, _MOST_PRIOR = 0.05, 0.98
_SELF_PRIOR = 0.95  # acceptance to expect of the target's own weights at lower precision


class Scheduler:
    """Makes each request's `Speculator`.

    Args:
        config: the bundle's.
        override: file of changes to it, read between rounds.
        draft: the bundle's draft model, if it has one; `draft_failure` says why it could not be loaded.
    """

    def __init__(
        self,
        manifest: Manifest,
        config: DflashConfig,
        override: Path | None,
        settings: SessionSettings,
        draft: CachedModel | None,
        draft_failure: str,
    ) -> None:
        draft_kind = manifest.draft.kind
        self.live = LiveConfig(config, override, PressureWatch(draft_kind), draft_kind)
        self.continuations = ContinuationCache(self.live.current.cache)
        self._manifest = manifest
        self._settings = settings
        self._draft_failure = draft_failure
        self._row_costs: dict[tuple[int, int], RoundCosts] = {}  # (version, context) -> costs
        self._proposers = _proposers(self.live.current, manifest, draft)
        self._costs: dict[ProposerKind, LiveCosts] = {}  # of the newest request, with what was measured so far

    def for_sequence(self, draft: CachedModel | None) -> Scheduler:
        """The scheduler of one more sequence: proposers of its own, the same configuration and known continuations."""
        other = copy(self)
        other._proposers = _proposers(self.live.current, self._manifest, draft)
        return other

    def row_costs(self, context: int) -> RoundCosts:
        """What a forward of the target costs by its rows after about `context` tokens, in plain steps."""
        key = self.live.version, context // _CONTEXT_STEP
        if key not in self._row_costs:
            known, _ = costs_for(self.live.current, self._settings, "ngram", key[1] * _CONTEXT_STEP)
            kept = {old: costs for old, costs in self._row_costs.items() if old[0] == key[0]}
            self._row_costs = kept | {key: known.costs()}
        return self._row_costs[key]

    @property
    def offered(self) -> tuple[str, ...]:
        """The proposers that a request may name."""
        return tuple(kind for kind in [*self._proposers, "cache"] if self._allowed(kind))

    def _allowed(self, kind: str) -> bool:
        config = self.live.configured  # memory pressure lets a proposer rest, it refuses no request that names it
        row = config.proposers.get(kind)  # type: ignore[call-overload]
        if kind == "cache":
            return row is not None and row.enabled and config.cache.enabled
        return self._manifest.draft.kind != "none" if row is None else row.enabled

    def update(self, changes: Mapping[str, Any]) -> None:
        """Change the configuration by dotted path, all or none.

        Raises:
            ConfigError: names the field and says why.
        """
        self.live.update(changes)

    def rewind(self, length: int) -> None:
        """Only the first `length` tokens that the caches have read still hold."""
        for proposer in self._proposers.values():
            proposer.rewind(length)

    def remember(self, tokens: Sequence[int], n_prompt: int, cuts: Sequence[int] = ()) -> None:
        """A generation has ended: keep what followed its prompt, if the configuration asks for it."""
        if self._allowed("cache"):
            self.continuations.configure(self.live.current.cache)
            self.continuations.remember(tokens, n_prompt, cuts)

    def reset(self) -> None:
        """The next request finds no known continuations and full stakes."""
        self.continuations.clear()
        for proposer in self._proposers.values():
            proposer.left = None

    def check(self, options: SpeculationOptions | None) -> None:
        """Refuse a request that `speculator` would refuse, before anything runs.

        Raises:
            RequestError: it names a proposer that is not offered.
        """
        self.live.poll()
        if options is not None:
            self._kinds(options)

    def speculator(
        self, options: SpeculationOptions | None, n_prompt: int, stats: GenerationStats, traced: bool = False
    ) -> Speculator | None:
        """The request's speculation, or None with the reason in the statistics.

        Args:
            traced: gather the signals for a trace, whatever the policy.

        Raises:
            RequestError: it names a proposer that is not offered.
        """
        self.live.poll()
        config = self.live.current
        stats.policy, stats.config_version, stats.config_updates = config.policy, self.live.version, self.live.updates
        stats.config_notes = self.live.notes
        if options is None:
            stats.speculation_reason = "switched off by the request"
            return None
        kinds = self._kinds(options)
        if not kinds:
            kind = self._manifest.draft.kind
            stats.speculation_reason = self._draft_failure or f"the bundle offers no draft of kind {kind!r}"
            return None
        by_costs = config.policy in ("calibrated", "batched")
        refresh = by_costs and config.calibrated.refresh_costs
        proposers = []
        for name in kinds:
            costs, stats.costs = costs_for(config, self._settings, name, n_prompt, self._costs.get(name))
            costs.age()
            self._costs[name] = costs
            proposer = self._proposer(name, n_prompt)
            if not refresh:
                proposer.left = None  # decisions depend on no request before
            proposers.append((proposer, costs))
        stats.speculation = "+".join(kinds)
        return Speculator(proposers, options, self.live, n_prompt, refresh, traced=traced)

    def _kinds(self, options: SpeculationOptions) -> list[ProposerKind]:
        """Who may draft: the proposer that is named; the bundle's draft where the window is fixed; otherwise all."""
        offered = self.offered
        draft = self._manifest.draft.kind
        if options.proposer is not None:
            if options.proposer not in offered:
                names = ", ".join(offered) or "none"
                raise RequestError("speculation.proposer", f"one of {names} is required, got {options.proposer!r}")
            return [options.proposer]  # type: ignore[list-item]
        if self.live.current.policy == "fixed" or options.window is not None:
            return [draft] if draft in offered else []
        return sorted(offered, key=lambda kind: kind != draft)  # type: ignore[arg-type]

    def _proposer(self, kind: ProposerKind, n_prompt: int) -> Proposer:
        if kind == "cache":
            return ContinuationProposer(self.continuations, n_prompt)
        found, config = self._proposers[kind], self.live.current
        if isinstance(found, ModelProposer):
            found.expected = (draft_prior(config, kind),) * 2
        elif isinstance(found, NgramProposer) and found.matches != _matches(config):
            found = self._proposers[kind] = NgramProposer(*_matches(config))
        return found


def _proposers(config: DflashConfig, manifest: Manifest, draft: CachedModel | None) -> dict[ProposerKind, Proposer]:
    """The proposers that outlive a request: prompt lookup, which needs nothing, and the bundle's draft model."""
    proposers: dict[ProposerKind, Proposer] = {"ngram": NgramProposer(*_matches(config))}
    if draft is not None:
        kind: ProposerKind = manifest.draft.kind
        proposers[kind] = _model_proposer(kind, draft, manifest, draft_prior(config, kind))
    return proposers


def _matches(config: DflashConfig) -> tuple[int, int]:
    """Tokens that a lookup must, and at most may, match."""
    row = config.proposers.get("ngram")
    return NgramProposer().matches if row is None else (row.min_match, row.max_match)


def draft_prior(config: DflashConfig, kind: ProposerKind) -> float:
    """Acceptance of a draft model's positions before anything was seen: as measured, within what can be learnt from."""
    row = config.proposers.get(kind)
    if row is not None and row.acceptance is not None:
        return min(max(row.acceptance, _LEAST_PRIOR), _MOST_PRIOR)
    return _SELF_PRIOR if kind == "self" else config.calibrated.prior_acceptance


def _model_proposer(kind: ProposerKind, model: CachedModel, manifest: Manifest, prior: float) -> ModelProposer:
    """The draft model, kept to the ids that it shares with the target; either vocabulary may be the larger."""
    entry = manifest.draft.model
    assert entry is not None
    widths = [manifest.target.info.vocab_size, entry.info.vocab_size]
    n_shared = manifest.draft.n_shared
    return ModelProposer(
        kind,
        model,
        (prior, prior),
        n_shared=min(widths if n_shared is None else [*widths, n_shared]),
        vocab_size=entry.info.vocab_size,
        unknown_id=min(entry.info.pad_id or 0, entry.info.vocab_size - 1),
    )
