"""`dsc simulate`: what other policies would have done on a recorded trace, by the bundle's cost curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

from dsc.bundle_schema.container import open_bundle
from dsc.bundle_schema.dflash_config import (
    DFLASH_CONFIG_NAME,
    MAX_WINDOW,
    DflashConfig,
    PolicyName,
    ProposerKind,
    apply_override,
    parse_config,
)
from dsc.bundle_schema.errors import RequestError
from dsc.bundle_schema.kv_layout import draft_shares
from dsc.bundle_schema.kv_plan import KV_PLAN_NAME, parse_plan
from dsc.compiler.console import parse_number, save_picture
from dsc.compiler.replay import ReplayCounts, ReplaySetup, replay
from dsc.compiler.trace_reader import TracedRequest, measured_rounds, read_trace, recorded_acceptance
from dsc.runtime.acceptance import RoundCosts
from dsc.runtime.costs import assumed_costs, curve_costs
from dsc.runtime.model_id import ModelId, model_id
from dsc.runtime.schedule_costs import LiveCosts
from dsc.runtime.schedule_lane import SHORT_LAG
from dsc.runtime.schedule_setup import LOOKUPS, draft_prior
from dsc.runtime.speculator import SpeculationOptions

CostSource = Literal["curve", "trace"]


@dataclass(frozen=True)
class PolicySpec:
    """A policy as named on the command line: ``off``, ``fixed:4``, ``rules``, ``calibrated`` or ``batched``."""

    text: str
    policy: PolicyName | None
    window: int | None = None


def parse_policies(text: str) -> list[PolicySpec]:
    """Comma-separated policies.

    Raises:
        RequestError: one of them is none; it is named.
    """
    return [_parse_policy(part.strip()) for part in text.split(",")]


def _parse_policy(text: str) -> PolicySpec:
    name, _, digits = text.partition(":")
    window = parse_number(digits)
    if text == "off":
        return PolicySpec(text, None)
    if name == "fixed" and window is not None and 1 <= window <= MAX_WINDOW:
        return PolicySpec(text, "fixed", window)
    if text in get_args(PolicyName):
        return PolicySpec(text, cast("PolicyName", text))
    known = "off, fixed, fixed:1 to fixed:16, rules, calibrated, batched"
    raise RequestError("--policy", f"one of {known} is required, got {text[:40]!r}")


class _Bench:
    """A bundle's schedule and a trace, on which policies are tried."""

    def __init__(self, bundle: Path, trace: Path, requests: Sequence[TracedRequest], source: CostSource) -> None:
        opened = open_bundle(bundle)
        _require_model(trace, requests, model_id(opened.manifest))
        self._config = parse_config(opened.read(DFLASH_CONFIG_NAME))
        self._draft: ProposerKind = opened.manifest.draft.kind
        self._has_model = opened.manifest.draft.model is not None
        self._reads = not draft_shares(parse_plan(opened.read(KV_PLAN_NAME)))
        self._requests = requests
        self.curves = self._config.cost_curves(self._config.costs[0].device) if self._config.costs else ()
        self._measured = self._observe() if source == "trace" else {}

    def kinds(self) -> tuple[ProposerKind, ...]:
        """Who may draft, the bundle's own draft first."""
        rows = self._config.proposers
        kinds: list[ProposerKind] = [self._draft] if self._has_model else []
        kinds += ["ngram"]
        if "cache" in rows and self._config.cache.enabled:
            kinds += ["cache"]
        return tuple(kind for kind in kinds if kind not in rows or rows[kind].enabled)

    def run(self, spec: PolicySpec) -> ReplayCounts:
        """Replay the trace by one policy."""
        config = self._config if spec.policy is None else apply_override(self._config, {"policy": spec.policy})
        kinds = self.kinds()
        if spec.policy == "fixed":
            kinds = tuple(kind for kind in kinds if kind == self._draft)
        setup = ReplaySetup(
            config=config,
            options=SpeculationOptions(window=spec.window) if spec.policy else None,
            kinds=kinds,
            decide=partial(self._costs, config),
            spend=self.spent,
            reading_ms=self._reading_ms(),
            host_ms=self._host_ms() if self._measured else 0.0,
            reads=self._reads,
            rates={kind: (self._rate(kind), draft_prior(config, kind)) for kind in kinds if kind not in LOOKUPS},
        )
        return replay(setup, self._requests)

    def _costs(
        self, config: DflashConfig, kind: ProposerKind, context: int, earlier: LiveCosts | None = None
    ) -> LiveCosts:
        if not self.curves:
            return assumed_costs(config, kind, earlier)
        return curve_costs(config, self.curves, kind, context, earlier)

    def spent(self, kind: str, context: int, late: bool = False) -> RoundCosts:
        """Costs that are counted: the curve's, or with what the trace measured where it measured something."""
        name = cast("ProposerKind", kind or self._draft)
        costs = self._costs(self._config, name, context, self._measured.get(name))
        # What the trace measured rarely must not change what it measured often.
        return costs.costs(late, smooth=not self._measured)

    def _observe(self) -> dict[ProposerKind, LiveCosts]:
        """Costs that have seen the trace's times, by proposer: each round at its own context, and all of them alike."""
        config = apply_override(self._config, {"calibrated.decay": 0.0})
        measured: dict[ProposerKind, LiveCosts] = {}
        for kind in {self._draft, *self.kinds()}:
            for line in measured_rounds(self._requests):
                measured[kind] = costs = self._costs(config, kind, line.n_tokens, measured.get(kind))
                drafted = len(line.draft_ids) if line.proposer == kind and line.lag <= 1 and not line.start else 0
                costs.observe(len(line.draft_ids) + 1, line.ms["forward"], drafted, line.ms.get("propose", 0.0))
        return measured

    def _host_ms(self) -> float:
        """What a round of the trace took outside of the models beyond what the curve has for it; 0 where no end was
        recorded.
        """
        host_ms, n_rounds = 0.0, 0
        for request in self._requests:
            rounds = [line for line in request.rounds if line.n_tokens > len(request.request.prompt_ids)]
            lines = list(measured_rounds([replace(request, rounds=rounds)]))
            if request.decoding_ms and len(lines) == len(rounds):  # others waited for rounds of an engine
                models = [line for line in lines if line.draft_ids and line.proposer not in LOOKUPS]
                proposing = sum(line.ms.get("propose", 0.0) for line in models)
                host_ms += request.decoding_ms - sum(line.ms["forward"] for line in lines) - proposing
                n_rounds += len(rounds)
        known = self.curves[0].host_ms if self.curves else 0.0
        return host_ms / n_rounds - known if host_ms > 0 else 0.0

    def _reading_ms(self) -> float:
        """Of a draft model for each token of a text that it had to read first: by the trace, brought to the speed of
        the costs that are counted; 0 where the curve tells it and is what counts.
        """
        lines = [line for line in measured_rounds(self._requests) if line.lag > SHORT_LAG and line.draft_ids]
        if not lines or (not self._measured and any(curve.read_ms for curve in self.curves)):
            return 0.0
        forward_ms = draft_ms = 0.0
        for line in lines:
            costs, n_drafts = self.spent(self._draft, line.n_tokens, line.start > 0), len(line.draft_ids)
            forward_ms += (costs.round(n_drafts) - costs.drafting(n_drafts)) * costs.step_ms
            draft_ms += costs.drafting(n_drafts) * costs.step_ms
        speed = forward_ms / sum(line.ms["forward"] for line in lines)
        propose_ms = sum(line.ms.get("propose", 0.0) for line in lines) * speed
        return max(propose_ms - draft_ms, 0.0) / sum(line.lag for line in lines)

    def _rate(self, kind: ProposerKind) -> float:
        judged = [item for request in self._requests for item in recorded_acceptance(request, kind).items()]
        known = [right for (_, late), right in judged if not late]
        return sum(known) / len(known) if known else draft_prior(self._config, kind)

    def recorded(self, kind: ProposerKind) -> int:
        """How many of a draft's tokens were judged in the recording."""
        return sum(len(recorded_acceptance(request, kind)) for request in self._requests)


def simulate(bundle: Path, trace: Path, policies: str, source: CostSource = "curve") -> dict[str, Any]:
    """Try policies on a trace.

    Args:
        policies: see `parse_policies`.
        source: ``curve`` takes the bundle's measured costs, ``trace`` corrects them by the trace's own times.

    Returns:
        `rows`, one a policy: tokens/s, speed against plain decoding, tokens a round, acceptance, windows, proposers,
        and why rounds were plain; `recorded`, the trace's own run; `notes` on what had to be assumed.

    Raises:
        RequestError: a policy or the trace is not what it should be, or another model was recorded.
        BundleError: the bundle is not sound.
    """
    specs = parse_policies(policies)
    requests = read_trace(trace)
    bench = _Bench(bundle, trace, requests, source)
    rows = [_row(spec.text, bench.run(spec)) for spec in specs]
    return {
        "bundle": str(bundle),
        "trace": str(trace),
        "costs": source,
        "n_requests": len(requests),
        "recorded": _recorded(requests),
        "rows": rows,
        "notes": _notes(bench, requests),
    }


def _require_model(trace: Path, requests: Sequence[TracedRequest], own: ModelId) -> None:
    for line in (request.request for request in requests):
        if line.model and line.model != own.digest:
            found = ModelId(line.name, line.model)
            raise RequestError(
                str(trace), f"a recording of {own} is required, got one of {found}", "record it with this bundle"
            )


def _row(name: str, counts: ReplayCounts) -> dict[str, Any]:
    return {
        "policy": name,
        "tokens_per_second": counts.tokens / counts.ms * 1000 if counts.ms else 0.0,
        "speed": counts.plain_ms / counts.ms if counts.ms else 0.0,
        "tokens_per_round": counts.tokens / counts.rounds if counts.rounds else 0.0,
        "rounds": counts.rounds,
        "proposed": counts.proposed,
        "acceptance": counts.accepted / counts.evaluated if counts.evaluated else 0.0,
        "windows": {str(window): count for window, count in sorted(counts.windows.items())},
        "proposers": dict(counts.proposers),
        "plain_rounds": dict(counts.reasons),
    }


def _recorded(requests: Sequence[TracedRequest]) -> dict[str, Any]:
    """The trace's own run, rounds only."""
    lines = list(measured_rounds(requests))
    ms = sum(sum(line.ms.values()) for line in lines)
    tokens = sum(len(line.new_ids) for line in lines)
    return {
        "policy": requests[0].request.policy,
        "speculation": requests[0].request.speculation,
        "tokens_per_second": tokens / ms * 1000 if ms else 0.0,
        "tokens_per_round": tokens / len(lines) if lines else 0.0,
    }


def _notes(bench: _Bench, requests: Sequence[TracedRequest]) -> list[str]:
    notes = [] if bench.curves else ["the bundle has no cost curve: costs are assumed"]
    for kind in bench.kinds():
        if kind not in LOOKUPS:
            n_known = bench.recorded(kind)
            n_tokens = sum(len(line.new_ids) for request in requests for line in request.rounds)
            notes.append(f"{kind}: {n_known} of {n_tokens} drafts recorded, the others drawn at the recorded rate")
    if not all(request.request.model for request in requests):
        notes.append("the trace does not name its model: that it is this bundle's is taken for granted")
    if not any(line.signals for request in requests for line in request.rounds):
        notes.append("the trace has no signals: `rules` sees only what is computed from tokens")
    return notes


def draw_simulation(report: dict[str, Any], picture: Path) -> None:
    """Bars of tokens/s, and the windows that each policy chose.

    Raises:
        RequestError: the file's ending names no picture format, or it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report["rows"]
    names = [row["policy"] for row in rows]
    figure, (speeds, windows) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    speeds.bar(names, [row["tokens_per_second"] for row in rows])
    speeds.axhline(report["recorded"]["tokens_per_second"], linestyle="--", color="grey", label="recorded run")
    speeds.set_ylabel("tokens/s")
    speeds.legend()
    for row in rows:
        counts = [row["windows"].get(str(window), 0) for window in range(MAX_WINDOW + 1)]
        total = sum(counts) or 1
        windows.plot(range(MAX_WINDOW + 1), [count / total for count in counts], marker="o", label=row["policy"])
    windows.set_xlabel("drafts in a round")
    windows.set_ylabel("share of rounds")
    windows.legend()
    save_picture(figure, picture)
