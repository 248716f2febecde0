"""Tables and charts of `pays.py`: every setting's speed against plain decoding, by category and over the mix."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import markdown_table

MIX = "mix"
POLICIES = ("calibrated", "rules")


@dataclass
class Run:
    """One setting on one prompt; `ms` is the time of all tokens, `same` compares with plain decoding."""

    bundle: str
    category: str
    prompt: str
    setting: str
    tokens: int
    ms: float
    foreign: float
    same: bool
    rounds: int
    windows: dict[str, int]
    proposers: dict[str, int]
    plain_rounds: dict[str, int]


Speeds = dict[str, dict[str, float]]  # setting -> category -> speed against plain decoding


def speeds(runs: Sequence[Run]) -> Speeds:
    """Time of plain decoding over a setting's time, each category's prompts together; the mix weighs categories alike.

    Plain decoding ran before and after the others: its time is the mean. A setting that has nothing to say in a
    category decodes plainly there.
    """
    plain: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        if run.setting == "plain":
            plain[run.category, run.prompt].append(run.ms)
    times: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        if run.setting != "plain":
            before = plain[run.category, run.prompt]
            times[run.setting, run.category].append((sum(before) / len(before), run.ms))
    found: Speeds = defaultdict(dict)
    for (setting, category), pairs in times.items():
        found[setting][category] = sum(one for one, _ in pairs) / sum(other for _, other in pairs)
    categories = {run.category for run in runs}
    for row in found.values():
        row[MIX] = len(categories) / sum(1 / row.get(category, 1.0) for category in categories)
    return dict(found)


def best_fixed(found: Speeds, category: str) -> tuple[str, float]:
    """The fastest setting that is no policy, plain decoding among them."""
    fixed = {name: row[category] for name, row in found.items() if name not in POLICIES and category in row}
    fixed["plain"] = 1.0
    name = max(fixed, key=fixed.__getitem__)
    return name, fixed[name]


def verdict(found: Speeds, categories: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """What was to be shown, per category and over the mix: what, found, wanted, reached."""
    rows = []
    for category in categories:
        own, (name, best) = found["calibrated"][category], best_fixed(found, category)
        rows.append((f"{category}: calibrated / best fixed ({name})", own / best, 0.98))
        rows.append((f"{category}: calibrated / plain", own, 0.97))
    name, best = best_fixed(found, MIX)
    rows.append((f"mix: calibrated / best single fixed ({name})", found["calibrated"][MIX] / best, 1.10))
    return [(what, f"{value:.2f}", f"{least:.2f}", "yes" if value >= least else "no") for what, value, least in rows]


def write_report(out: Path, runs: Sequence[Run], foreign: float) -> None:
    """`pays.md`, `pays.json`, and a chart for each bundle."""
    parts = [
        "# Does the scheduler pay?\n",
        "Speed against plain decoding of the same prompts: sums of the time to decode after a prompt that the target "
        "has read and a draft model has not. The mix is the harmonic mean of the categories.\n",
    ]
    record: dict[str, Any] = {}
    for bundle in dict.fromkeys(run.bundle for run in runs):
        own = [run for run in runs if run.bundle == bundle]
        found = speeds(own)
        categories = list(dict.fromkeys(run.category for run in own))
        n_prompts = len({(run.category, run.prompt) for run in own})
        disturbed = sum(run.foreign > foreign for run in own)
        differing = sum(not run.same for run in own)
        parts += [
            f"## {bundle}\n",
            f"{n_prompts} prompts, {len(own)} runs, {disturbed} of them disturbed, {differing} with another output.\n",
            speed_table(found, categories),
            markdown_table(("what", "found", "wanted", "reached"), verdict(found, categories)),
            f"![{bundle}](pays-{bundle}.png)\n",
        ]
        draw(out / f"pays-{bundle}.png", bundle, found, own, categories)
        record[bundle] = {"speeds": found, "verdict": verdict(found, categories), "differing": differing}
    parts += [
        "## Prompts\n",
        *(f"- {category}: {', '.join(sources)}" for category, sources in prompts(runs).items()),
        "",
    ]
    (out / "pays.md").write_text("\n".join(parts), encoding="utf-8")
    (out / "pays.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def prompts(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Where the prompts of each category are from."""
    return {
        category: list(dict.fromkeys(run.prompt for run in runs if run.category == category))
        for category in dict.fromkeys(run.category for run in runs)
    }


def speed_table(found: Speeds, categories: Sequence[str]) -> str:
    """One line a setting, the policies first."""
    names = [*POLICIES, *sorted(name for name in found if name not in POLICIES)]
    rows = [[name, *(_cell(found[name], category) for category in [*categories, MIX])] for name in names]
    return markdown_table(("setting", *categories, MIX), rows)


def _cell(row: Mapping[str, float], category: str) -> str:
    return f"{row[category]:.2f}" if category in row else "-"


def draw(path: Path, bundle: str, found: Speeds, runs: Iterable[Run], categories: Sequence[str]) -> None:
    """Speeds as bars, and the windows that `calibrated` chose in each category."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bars, windows) = pyplot.subplots(1, 2, figsize=(14, 5), layout="constrained", width_ratios=(3, 2))
    names = [*POLICIES, *sorted(name for name in found if name not in POLICIES)]
    width = 0.85 / len(names)
    for place, name in enumerate(names):
        at = [index + place * width for index in range(len(categories) + 1)]
        bars.bar(at, [found[name].get(category, 0.0) for category in [*categories, MIX]], width, label=name)
    bars.set_xticks([index + 0.4 for index in range(len(categories) + 1)], [*categories, MIX])
    bars.axhline(1.0, color="grey", linewidth=0.8)
    bars.set_ylabel("speed against plain decoding")
    bars.set_title(bundle)
    bars.legend(fontsize="small", ncols=2)
    for category in categories:
        counts: Counter[int] = Counter()
        for run in runs:
            if run.setting == "calibrated" and run.category == category:
                counts.update({int(window): count for window, count in run.windows.items()})
        total = counts.total() or 1
        most = max(counts, default=0)
        windows.plot([counts[window] / total for window in range(most + 1)], marker="o", label=category)
    windows.set_xlabel("drafts in a round of `calibrated`")
    windows.set_ylabel("share of rounds")
    windows.legend(fontsize="small")
    figure.savefig(path)
    pyplot.close(figure)
