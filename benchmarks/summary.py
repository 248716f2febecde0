"""Figures from rows: medians of clean runs, ratios of paired runs, identity of speculative and plain output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from contenders import PLAIN, Contender
from measure import Row

CATEGORIES = ("chat", "edit", "quote", "document")
TIMED = {**{name: (name,) for name in CATEGORIES}, "edit and quote": ("edit", "quote")}
"""What is timed together -> its categories."""
SHORT, LONG = "past 64", "past 512"


@dataclass(frozen=True)
class Figure:
    """A median, of how many runs, and whether all of them were clean."""

    value: float
    runs: int
    clean: bool

    def text(self, decimals: int = 1) -> str:
        """For tables: a star marks a figure for which no undisturbed run was had."""
        return f"{self.value:.{decimals}f}{'' if self.clean else '*'}"


@dataclass
class Series:
    """One line of the table: a contender in one mode.

    Attributes:
        rate: category -> tokens/s of decoding.
        ratio: category -> that of the same prompts over plain decoding, median of pairs.
        by_time: the same by the time that all prompts take together, by the names in `TIMED`.
        prefill: tokens/s of reading the long fixed prompt.
        ready_s: from the start of loading to the first token of a 64-token prompt.
        same: prompts whose output equals plain decoding's, of `compared`.
    """

    name: str
    version: str = ""
    megabytes: float = 0.0
    rate: dict[str, Figure] = field(default_factory=dict)
    ratio: dict[str, Figure] = field(default_factory=dict)
    by_time: dict[str, Figure] = field(default_factory=dict)
    prefill: Figure | None = None
    ready_s: Figure | None = None
    peak_mb: Figure | None = None
    tokens_per_round: dict[str, Figure] = field(default_factory=dict)
    same: int = 0
    compared: int = 0


@dataclass(frozen=True)
class HostCost:
    """Where a plain decoding step of dsc goes, in milliseconds, and the least that reading the weights takes."""

    name: str
    past: str
    step_ms: float
    ort_ms: float
    host_ms: float
    limit_ms: float

    @property
    def host_share(self) -> float:
        """Of the step."""
        return self.host_ms / self.step_ms


def figure(rows: Sequence[Row], value: Callable[[Row], float]) -> Figure | None:
    """The median over the clean rows, over all of them when none is clean."""
    clean = [row for row in rows if row.clean]
    used = clean or list(rows)
    return Figure(median(map(value, used)), len(used), bool(clean)) if used else None


def summarise(rows: Sequence[Row], contenders: Iterable[Contender]) -> list[Series]:
    """One `Series` for each contender and mode that ran."""
    plain = {(row.contender, row.round, row.category, row.case): row for row in rows if row.mode == PLAIN}
    made = []
    for contender in contenders:
        for mode in contender.modes:
            own = [row for row in rows if row.contender == contender.name and row.mode == mode]
            if any(row.category != "start" for row in own):
                partners = plain if mode != PLAIN else {}
                made.append(_series(contender, mode, own, rows, partners))
    return made


def _series(
    contender: Contender,
    mode: str,
    own: Sequence[Row],
    rows: Sequence[Row],
    plain: dict[tuple[str, int, str, str], Row],
) -> Series:
    of_process = [row for row in rows if row.contender == contender.name and row.category != "skipped"]
    starts = [row for row in of_process if row.category == "start"]
    ran = any(row.contender == contender.baseline and row.mode == PLAIN for row in rows)
    baseline = contender.baseline if ran else contender.name
    series = Series(f"{contender.name} {mode}", megabytes=contender.megabytes)
    series.version = starts[0].detail.get("version", "") if starts else ""
    series.ready_s = figure(starts, lambda row: row.detail["load_s"] + row.first_s)
    last = {row.round: row for row in of_process}
    series.peak_mb = figure(list(last.values()), lambda row: row.peak_mb)
    for category in (SHORT, LONG, *CATEGORIES):
        found = [row for row in own if row.category == category]
        _put(series.rate, category, figure(found, lambda row: row.tokens_per_second))
        told = [row for row in found if row.detail.get("stats")]
        _put(series.tokens_per_round, category, figure(told, lambda row: row.detail["stats"]["tokens_per_round"]))
        pairs = _pairs(found, baseline, plain)
        _put(series.ratio, category, _ratio(pairs))
        series.compared += len({row.case for row, _ in pairs})
        series.same += len({row.case for row, _ in pairs} - {row.case for row, other in pairs if row.ids != other.ids})
    for name, categories in TIMED.items():
        found = [row for row in own if row.category in categories]
        _put(series.by_time, name, _by_time(_pairs(found, baseline, plain)))
    long = [row for row in own if row.category == LONG]
    series.prefill = figure(long, lambda row: row.n_prompt / row.first_s)
    return series


def _put(figures: dict[str, Figure], name: str, found: Figure | None) -> None:
    if found is not None:
        figures[name] = found


def _pairs(rows: Sequence[Row], baseline: str, plain: dict[tuple[str, int, str, str], Row]) -> list[tuple[Row, Row]]:
    """Each row with the baseline's plain row of the same round and prompt."""
    keyed = ((row, plain.get((baseline, row.round, row.category, row.case))) for row in rows)
    return [(row, other) for row, other in keyed if other is not None]


def _used(pairs: Sequence[tuple[Row, Row]]) -> tuple[list[tuple[Row, Row]], bool]:
    """The clean pairs, all of them when none is clean, and whether they are."""
    clean = [pair for pair in pairs if pair[0].clean and pair[1].clean]
    return [pair for pair in clean or pairs if min(row.tokens_per_second for row in pair) > 0], bool(clean)


def _ratio(pairs: Sequence[tuple[Row, Row]]) -> Figure | None:
    used, clean = _used(pairs)
    if not used:
        return None
    return Figure(median(a.tokens_per_second / b.tokens_per_second for a, b in used), len(used), clean)


def _by_time(pairs: Sequence[tuple[Row, Row]]) -> Figure | None:
    """Seconds a token of the plain runs over those of the others, each prompt counting the same."""
    used, clean = _used(pairs)
    if not used:
        return None
    mine, plain = (sum(1 / pair[at].tokens_per_second for pair in used) for at in (0, 1))
    return Figure(plain / mine, len(used), clean)


def host_costs(rows: Sequence[Row], bandwidth: float) -> list[HostCost]:
    """The plain decoding step of every dsc bundle, at both fixed lengths."""
    facts = {row.contender: row.detail["facts"] for row in rows if row.category == "start"}
    made = []
    for past in (SHORT, LONG):
        for name, known in facts.items():
            own = [row for row in rows if row.contender == name and row.mode == PLAIN and row.category == past]
            timed = [row for row in own if "ort_s" in row.detail]
            step = figure(timed, lambda row: (row.total_s - row.first_s) / (len(row.ids) - 1))
            ort = figure(timed, lambda row: row.detail["ort_s"] / (len(row.ids) - 1))
            if step is None or ort is None:
                continue
            limit = known.get("target_bytes", known["weight_bytes"]) / bandwidth
            made.append(
                HostCost(name, past, *(1e3 * x for x in (step.value, ort.value, step.value - ort.value, limit)))
            )
    return made


def targets(series: Sequence[Series], facts: dict[str, dict[str, Any]]) -> list[tuple[str, Figure]]:
    """What the project set out to reach, as ratios: plain decoding, prefill, start and memory against the best peer."""
    named = {item.name: item for item in series}
    made: list[tuple[str, Figure]] = []

    def compare(what: str, own: Figure | None, others: Sequence[Figure | None], best: Callable[..., float]) -> None:
        known = [other for other in others if other is not None]
        if own is not None and known:
            other = best(known, key=lambda figure: figure.value)
            made.append((what, Figure(own.value / other.value, own.runs, own.clean and other.clean)))

    rivals = {"int4": ("genai int4",), "fp32": ("genai fp32",), "keep": ("llama.cpp Q4_1",)}
    for precision, names in rivals.items():
        own = named.get(f"dsc {precision} {PLAIN}")
        peers = [named[f"{name} {PLAIN}"] for name in names if f"{name} {PLAIN}" in named]
        if own is None or not peers:
            continue
        against = f"dsc {precision} / {' or '.join(names)}"
        for past in (SHORT, LONG):
            rates = [peer.rate.get(past) for peer in peers]
            compare(f"{against}: plain decoding, {past}", own.rate.get(past), rates, max)
        compare(f"{against}: prefill of 512", own.prefill, [peer.prefill for peer in peers], max)
        compare(f"{against}: load to first token", own.ready_s, [peer.ready_s for peer in peers], min)
        compare(f"{against}: peak memory", own.peak_mb, [peer.peak_mb for peer in peers], min)
    for item in series:
        known = facts.get(item.name.removesuffix(f" {PLAIN}"), {})
        if item.peak_mb is not None and known:
            allowed = (known["weight_bytes"] + known["arena_bytes"]) / 1e6 + 100
            share = Figure(item.peak_mb.value / allowed, item.peak_mb.runs, item.peak_mb.clean)
            made.append((f"{item.name}: peak memory / (weights + arena + 100 MB)", share))
    return made
