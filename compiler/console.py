"""What people see: tables, progress and JSON. Rich draws; without a terminal the text stays plain."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsc.bundle_schema.errors import CheckFailed, DscError, HostError, RequestError

if TYPE_CHECKING:
    from types import TracebackType

    from matplotlib.figure import Figure

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class ReportedFailure(CheckFailed):
    """A check whose report is on stdout already, with what failed in it."""


class ReportedHostError(HostError):
    """The same of what the machine lacks."""


def is_reported(error: DscError) -> bool:
    """Whether standard output has a report that tells of the error."""
    return isinstance(error, ReportedFailure | ReportedHostError)


def is_terminal() -> bool:
    """Whether a person watches: progress goes to stderr, so that is what counts."""
    return sys.stderr.isatty()


def format_nbytes(nbytes: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    for unit in _UNITS[:-1]:
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} {_UNITS[-1]}"


def parse_number(text: str) -> int | None:
    """A whole number as people type it, of at most nine digits; None when it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else None


def print_json(data: Any) -> None:
    """One JSON document on stdout, keys sorted."""
    print(json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout; numbers are right-aligned."""
    from rich.console import Console
    from rich.table import Table

    rows = [list(row) for row in rows]
    table = Table(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    # Names and messages are shown as they are: brackets and colons in them are no markup.
    console = Console(width=None if sys.stdout.isatty() else 120, markup=False, emoji=False)
    with console.capture() as drawn:  # rich would end the process with 1 where the reader has gone
        console.print(table)
    print(drawn.get(), end="")


def print_fields(title: str, fields: dict[str, object]) -> None:
    """Two columns, name and value."""
    print_table(title, ("", ""), [(name, "-" if value is None else value) for name, value in fields.items()])


def print_report(data: dict[str, Any], as_json: bool) -> None:
    """A nested report: as JSON, or each inner mapping as its own table."""
    if as_json:
        print_json(data)
        return
    flat = {key: value for key, value in data.items() if not isinstance(value, dict)}
    if flat:
        print_fields("", flat)
    for key, value in data.items():
        if isinstance(value, dict):
            print_fields(key, value)


def save_picture(figure: Figure, picture: Path) -> None:
    """Write a figure of matplotlib in the format that the file's ending names, and let it go.

    Raises:
        RequestError: the ending names no picture format, or the file cannot be written.
    """
    from matplotlib import pyplot

    try:
        figure.savefig(picture, dpi=140)
    except ValueError as error:
        raise RequestError(str(picture), f"an ending that names a picture format is required: {error}") from None
    except OSError as error:
        raise RequestError(str(picture), f"the picture cannot be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)


class Progress:
    """A progress bar over named stages, on stderr; silent when not enabled."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._enabled:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("{task.description:<8}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, name: str, index: int, total: int) -> None:
        """Show that stage `name`, number `index` of `total`, begins."""
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task(name, total=total)
        self._bar.update(self._task, description=name, completed=index)
