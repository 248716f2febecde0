"""The benchmark's tables and chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from summary import CATEGORIES, LONG, SHORT, TIMED, Figure, HostCost, Series


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def write_markdown(
    path: Path,
    machine: dict[str, Any],
    series: Sequence[Series],
    costs: Sequence[HostCost],
    targets: Sequence[tuple[str, Figure]],
    skipped: dict[str, str],
) -> None:
    """One page with everything that was found."""
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    parts = [
        f"# Benchmark\n\n{facts}.\n",
        "Tokens/s of greedy decoding, medians; in brackets the median ratio to plain decoding of the same prompt. "
        "A star: no run without other load on the machine was had.\n",
        speed_table(series),
        "## Speculation by the time of all prompts\n\nPlain decoding's time over that of speculation, all prompts of a "
        "category together.\n",
        time_table(series),
        "## Ratios\n\nUp is faster for rates; for times and memory less than 1 is better.\n",
        markdown_table(("what", "ratio"), [(what, ratio.text(2)) for what, ratio in targets]),
        "## Where a plain decoding step goes\n\nHost: everything outside onnxruntime's calls. Limit: the time in "
        "which this machine's memory delivers the bytes of the target's weights.\n",
        host_table(costs),
        "## Skipped\n",
        markdown_table(("runtime", "why"), skipped.items()) if skipped else "Nothing.\n",
        "## Versions\n",
        markdown_table(("series", "version"), [(item.name, item.version) for item in series]),
    ]
    path.write_text("\n".join(parts), encoding="utf-8")


def speed_table(series: Sequence[Series]) -> str:
    """The main table."""
    header = (
        "series",
        "MB",
        "start s",
        "peak MB",
        "prefill",
        SHORT,
        LONG,
        *CATEGORIES,
        "tokens/round",
        "same as plain",
    )
    rows = []
    for item in series:
        start, peak = _text(item.ready_s, 2), _text(item.peak_mb, 0)
        same = f"{item.same} of {item.compared}" if item.compared else ""
        rounds = " / ".join(
            f"{item.tokens_per_round[name].value:.2f}" for name in CATEGORIES if name in item.tokens_per_round
        )
        rates = [_rate(item, name) for name in (SHORT, LONG, *CATEGORIES)]
        rows.append((item.name, f"{item.megabytes:.0f}", start, peak, _text(item.prefill, 0), *rates, rounds, same))
    return markdown_table(header, rows)


def time_table(series: Sequence[Series]) -> str:
    """What speculation gains by summed times."""
    rows = [(item.name, *(_text(item.by_time.get(name), 2) for name in TIMED)) for item in series if item.by_time]
    return markdown_table(("series", *TIMED), rows)


def host_table(costs: Iterable[HostCost]) -> str:
    """Step, onnxruntime, host and physical limit."""
    rows = [
        (
            cost.name,
            cost.past,
            f"{cost.step_ms:.2f}",
            f"{cost.ort_ms:.2f}",
            f"{cost.host_ms:.2f}",
            f"{cost.host_share:.1%}",
            f"{cost.limit_ms:.2f}",
        )
        for cost in costs
    ]
    return markdown_table(("bundle", "context", "step ms", "onnxruntime ms", "host ms", "host share", "limit ms"), rows)


def _text(figure: Figure | None, decimals: int) -> str:
    return figure.text(decimals) if figure is not None else ""


def _rate(series: Series, category: str) -> str:
    rate, ratio = series.rate.get(category), series.ratio.get(category)
    if rate is None:
        return ""
    return f"{rate.text()} ({ratio.text(2)})" if ratio is not None else rate.text()


def draw_chart(path: Path, series: Sequence[Series]) -> None:
    """Bars of tokens/s: a panel for each category, a bar for each series, speculation in the darker colour."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(CATEGORIES), sharey=True, figsize=(15, 1.5 + 0.3 * len(series)))
    for panel, category in zip(panels, CATEGORIES, strict=True):
        shown = [(item, item.rate.get(category)) for item in series]
        values = [rate.value if rate is not None else 0.0 for _, rate in shown]
        colours = ["#9db4cc" if not item.ratio else "#2f6690" for item, _ in shown]
        bars = panel.barh([item.name for item, _ in shown], values, color=colours)
        panel.bar_label(bars, [_label(item, category) for item, _ in shown], padding=3, fontsize=8)
        panel.set_title(category)
        panel.set_xlabel("tokens/s")
        panel.set_xlim(0, 1.35 * max([1.0, *values]))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.suptitle("Greedy decoding; dark: with speculation, and its ratio to plain decoding")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _label(series: Series, category: str) -> str:
    rate, ratio = series.rate.get(category), series.ratio.get(category)
    if rate is None:
        return ""
    return f"{rate.value:.0f}" + (f"  {ratio.value:.2f}x" if ratio is not None else "")
