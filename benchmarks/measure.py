"""Rounds of measurements: one runtime at a time, in rotated order, repeated when others used the machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contenders import PLAIN, Contender
from workers import Worker, WorkerError, worker

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Case:
    """One prompt: its category, its name within it, its ids, the most tokens to make, and in which modes."""

    category: str
    name: str
    ids: tuple[int, ...]
    n_tokens: int
    plain_only: bool = False


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        rounds: every contender runs once a round.
        cases_a_round: prompts of each category a round; the next round takes the next ones.
        threads: of every runtime.
        foreign: largest share of the machine that others may use during a run.
        retries: how often a disturbed run is repeated before the least disturbed one is kept, marked.
    """

    rounds: int
    cases_a_round: int
    threads: int
    foreign: float
    retries: int


@dataclass
class Row:
    """One run. `ids`, times and `detail` are the runtime's answer; `clean` says that others kept quiet."""

    round: int
    contender: str
    mode: str
    category: str
    case: str
    n_prompt: int
    ids: list[int]
    first_s: float
    total_s: float
    foreign: float
    clean: bool
    peak_mb: float
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def series(self) -> str:
        """Contender and mode."""
        return f"{self.contender} {self.mode}"

    @property
    def tokens_per_second(self) -> float:
        """Decoding rate: tokens after the first over the time after the first."""
        seconds = self.total_s - self.first_s
        return (len(self.ids) - 1) / seconds if seconds > 0 else 0.0


def run_rounds(
    contenders: Sequence[Contender],
    fixed: Sequence[Case],
    cases: Sequence[Case],
    settings: Settings,
    say: Callable[[str], None],
) -> Iterator[Row]:
    """Yield the rows of every round.

    Args:
        fixed: cases of every round.
        cases: are dealt out over the rounds, `cases_a_round` of each category.
        say: gets a line of progress; a contender that fails is reported there, and left out from then on.
    """
    failed: set[str] = set()
    for index in range(settings.rounds):
        dealt = [*fixed, *deal(cases, index, settings.cases_a_round)]
        turn = index % len(contenders)
        for contender in [*contenders[turn:], *contenders[:turn]]:
            if contender.name in failed:
                continue
            say(f"round {index + 1} of {settings.rounds}: {contender.name}")
            try:
                yield from run_contender(contender, dealt, index, settings)
            except WorkerError as error:
                failed.add(contender.name)
                say(f"{contender.name} is skipped: {error}")
                yield skipped(contender, index, str(error))


def deal(cases: Iterable[Case], index: int, each: int) -> list[Case]:
    """The cases of round `index`: of each category the next `each`, from the front again at the end."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.category, []).append(case)
    return [
        group[place % len(group)]
        for group in groups.values()
        for place in range(index * each, index * each + min(each, len(group)))
    ]


def run_contender(contender: Contender, cases: Sequence[Case], index: int, settings: Settings) -> Iterator[Row]:
    """One round of one contender in a fresh process.

    Raises:
        WorkerError: it cannot run.
    """
    if contender.missing:
        raise WorkerError(contender.missing)
    options = {"model": str(contender.model.resolve()), "threads": settings.threads, **contender.options}
    with worker(contender.python, contender.peer, options) as running:
        first = Case("start", "load to first token", cases[0].ids[:64], 1)
        start_mode = next(iter(contender.modes))
        started = one_run(running, contender, start_mode, first, index, settings)
        started.detail |= running.loaded
        yield started
        for mode, speculation in contender.modes.items():  # first runs make buffers, bind shapes, wake threads
            if mode != start_mode or cases:
                running.generate(cases[0].ids, WARM_UP_TOKENS, speculation)
        for number, case in enumerate(cases):
            modes = [mode for mode in contender.modes if mode == PLAIN or not case.plain_only]
            turn = (number + index) % max(1, len(modes))
            for mode in [*modes[turn:], *modes[:turn]]:
                yield clean_run(running, contender, mode, case, index, settings)


def clean_run(running: Worker, contender: Contender, mode: str, case: Case, index: int, settings: Settings) -> Row:
    """Run a case until others leave the machine alone; after the last attempt the least disturbed run."""
    attempts = []
    for _ in range(settings.retries + 1):
        attempts.append(one_run(running, contender, mode, case, index, settings))
        if attempts[-1].clean:
            return attempts[-1]
    return min(attempts, key=lambda row: row.foreign)


def one_run(running: Worker, contender: Contender, mode: str, case: Case, index: int, settings: Settings) -> Row:
    answer = running.generate(case.ids, case.n_tokens, contender.modes[mode])
    taken = {name: answer.pop(name) for name in ("ids", "first_s", "total_s", "foreign", "peak_mb")}
    return Row(
        round=index,
        contender=contender.name,
        mode=mode,
        category=case.category,
        case=case.name,
        n_prompt=len(case.ids),
        clean=taken["foreign"] <= settings.foreign,
        detail=answer,
        **taken,
    )


def skipped(contender: Contender, index: int, reason: str) -> Row:
    """The row that says why a contender is absent."""
    return Row(index, contender.name, "", "skipped", "", 0, [], 0.0, 0.0, 0.0, True, 0.0, {"reason": reason})


def write_rows(path: Path, rows: Iterable[Row]) -> list[Row]:
    """Append each row to a JSON-lines file as it comes; returns them all."""
    written = []
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            written.append(row)
    return written


def read_rows(path: Path) -> list[Row]:
    """The rows of an earlier run."""
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
