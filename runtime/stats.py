"""What a generation did, counted so that every row of work is accounted for once.

Drafts: ``proposed >= evaluated >= accepted``; the difference of the first two lay behind a rejected draft.

Tokens: ``emitted + discarded == accepted + correction + bonus``; a round ends with a correction (a draft was rejected,
or none was proposed) or with a bonus (all drafts held).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class ProposerStats:
    """Rounds, drafts and time of one proposer; `ms` is the time of rounds for which it drafted."""

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    ms: float = 0.0


@dataclass
class GenerationStats:
    """Counters and times of one call of `generate`.

    Attributes:
        speculation: the proposers in use, the preferred one first, or ``off``.
        speculation_reason: why speculation is off; empty otherwise.
        provider: where the graphs run.
        kernels: ``native`` or ``ort``, on a device ``dspark`` or ``ort``; `kernels_reason` says why not others.
        certificate: the verdict of the bundle's certificate.
        costs: where the costs come from by which windows are chosen.
        policy: the policy that chooses them; `config_version` counts the changes of the configuration it acts on and
            `config_updates` tells the latest, refused ones with the reason. `config_notes` are the fields that
            this runtime does not act on although they differ from their defaults, each with the reason.
        sharing: in an engine, whether the rounds share a forward with other sequences, or why not; empty outside.
        profile: what the device's profile decided at load.
        memory_pressure: the machine's memory is nearly full, and what the configuration says for it is in force.
        seed: of the draws; None when there were none.
        prompt_tokens: tokens of the prompt; `cached_tokens` of them were not read, because the live cache or a
            saved text held them; `restored_tokens` is what it came to with rows from a saved text, 0 without.
        prefix_reason: why no text is saved here for later prompts, or why a known one did not help; empty otherwise.
        rounds: target forwards after the prompt.
        proposed: draft tokens proposed.
        evaluated: draft tokens that the target judged, up to and including the first rejected one.
        accepted: draft tokens that held.
        correction: tokens the target put in place of a rejected or absent draft.
        bonus: tokens the target added after a block that held entirely.
        emitted: tokens of the result.
        discarded: verified tokens after the end (stop, length) of the output.
        position_evaluated: how often draft position 0, 1, ... was judged.
        position_accepted: how often it held.
        windows: how many rounds had 0, 1, 2, ... drafts.
        fallbacks: why rounds were decoded plainly, counted.
        ms: milliseconds by phase: prefill, propose, forward, shared (a forward with other sequences), verify, host.
        first_token_ms: from the call to the first token.
        total_ms: from the call to the end.
    """

    speculation: str = "off"
    speculation_reason: str = ""
    provider: str = ""
    kernels: str = ""
    kernels_reason: str = ""
    certificate: str = ""
    costs: str = ""
    policy: str = ""
    config_version: int = 0
    config_updates: list[str] = field(default_factory=list)
    config_notes: list[str] = field(default_factory=list)
    sharing: str = ""
    profile: str = ""
    memory_pressure: bool = False
    seed: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    prefix_reason: str = ""
    rounds: int = 0
    proposed: int = 0
    evaluated: int = 0
    accepted: int = 0
    correction: int = 0
    bonus: int = 0
    emitted: int = 0
    discarded: int = 0
    position_evaluated: Counter[int] = field(default_factory=Counter)
    position_accepted: Counter[int] = field(default_factory=Counter)
    windows: Counter[int] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    proposers: dict[str, ProposerStats] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)
    first_token_ms: float = 0.0
    total_ms: float = 0.0

    def count_round(self, proposed: int, accepted: int) -> None:
        """Book one verified block."""
        evaluated = min(accepted + 1, proposed)
        self.rounds += 1
        self.windows[proposed] += 1
        self.proposed += proposed
        self.evaluated += evaluated
        self.accepted += accepted
        if proposed:
            self.position_evaluated.update(range(evaluated))
            self.position_accepted.update(range(accepted))
        if 0 < proposed == accepted:
            self.bonus += 1
        else:
            self.correction += 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the judged drafts; 0 when none was judged."""
        return self.accepted / self.evaluated if self.evaluated else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens of a target forward, correction or bonus included."""
        return (self.emitted + self.discarded) / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after the first over the time after the first."""
        seconds = (self.total_ms - self.first_token_ms) / 1000
        return (self.emitted - 1) / seconds if self.emitted > 1 and seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the derived rates included."""
        record: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        for name, value in record.items():
            if isinstance(value, Counter):
                record[name] = {str(key): count for key, count in sorted(value.items())}
        record["proposers"] = {name: asdict(stats) for name, stats in self.proposers.items()}
        rates = ("acceptance_rate", "tokens_per_round", "tokens_per_second")
        return record | {name: getattr(self, name) for name in rates}

    def pretty(self) -> str:
        """A few lines for people."""
        why = f" ({self.speculation_reason})" if self.speculation_reason else ""
        phases = ", ".join(f"{phase} {ms:.0f}" for phase, ms in self.ms.items())
        fallbacks = ", ".join(f"{reason} {count}" for reason, count in self.fallbacks.items()) or "none"
        return "\n".join(
            [
                f"{self.emitted} tokens, {self.tokens_per_second:.1f} tokens/s, "
                f"first token after {self.first_token_ms:.0f} ms",
                f"speculation {self.speculation}{why}: {self.rounds} rounds, "
                f"{self.tokens_per_round:.2f} tokens a round",
                f"drafts: {self.proposed} proposed, {self.evaluated} evaluated, {self.accepted} accepted "
                f"({self.acceptance_rate:.0%}); {self.correction} corrections, {self.bonus} bonus, "
                f"{self.discarded} discarded",
                f"policy {self.policy}; plain rounds: {fallbacks}",
                f"ms: {phases}",
                f"provider {self.provider}, kernels {self.kernels}, certificate {self.certificate}",
            ]
        )
