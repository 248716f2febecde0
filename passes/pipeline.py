"""Passes by name, run in order, each one timed and its graph verified before the next one starts."""

from __future__ import annotations

import re
import time
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import onnx_ir as ir
from pydantic import TypeAdapter, ValidationError

from dsc.bundle_schema.errors import DscError, PassError, RequestError
from dsc.passes import ALL_PASSES
from dsc.passes.base import PROGRAM_ONLY, GraphPass, Reason
from dsc.passes.verify_graph import verify_graph

_ITEM = re.compile(r"([a-z0-9-]+)(?:\{([^{}]*)\})?")
_LIST = re.compile(rf"\s*(?:{_ITEM.pattern}\s*(?:,\s*{_ITEM.pattern}\s*)*)?")


@dataclass(frozen=True)
class PassRun:
    """One pass of a pipeline that ran and whose graph was found valid.

    Attributes:
        spec: the pass with its options, ``name{option=value}``.
        seconds: time in the pass, verification excluded.
        verify_seconds: time in the verification after it.
    """

    spec: str
    seconds: float
    verify_seconds: float
    fired: int
    skipped: tuple[Reason, ...]

    @property
    def modified(self) -> bool:
        """Whether the pass changed the graph."""
        return self.fired > 0


@dataclass(frozen=True)
class PipelineReport:
    """What every pass of a pipeline did, in order."""

    runs: tuple[PassRun, ...]

    @property
    def seconds(self) -> float:
        """Time of all passes and verifications."""
        return sum(run.seconds + run.verify_seconds for run in self.runs)

    @property
    def modified(self) -> bool:
        """Whether any pass changed the graph."""
        return any(run.modified for run in self.runs)


AfterEach = Callable[[GraphPass, ir.Model, PassRun], None]


def load_pass(name: str) -> type[GraphPass]:
    """The class of the pass called `name`.

    Raises:
        RequestError: no pass has that name; the message lists those that exist.
    """
    if name not in ALL_PASSES:
        raise RequestError(f"pass {name!r}", "there is no such pass", f"known: {', '.join(sorted(ALL_PASSES))}")
    module, _, class_name = ALL_PASSES[name].partition(":")
    return typing.cast(type[GraphPass], getattr(import_module(module), class_name))


def parse_pipeline(text: str) -> tuple[GraphPass, ...]:
    """Passes from ``"first,second{option=1,list=a|b}"``; options not named keep their defaults.

    Raises:
        RequestError: the text, a pass's name, an option's name or an option's value is wrong.
    """
    if not _LIST.fullmatch(text):
        raise RequestError("passes", f"required name{{option=value}},name, got {text!r}")
    return tuple(_make_pass(item[1], item[2] or "") for item in _ITEM.finditer(text))


def _make_pass(name: str, options: str) -> GraphPass:
    cls = load_pass(name)
    hints = typing.get_type_hints(cls)
    known = {field.name for field in fields(cls) if field.metadata != PROGRAM_ONLY}
    values: dict[str, object] = {}
    for option in filter(None, (part.strip() for part in options.split(","))):
        key, equals, value = option.partition("=")
        if key not in known or not equals:
            choices = ", ".join(sorted(known)) or "none"
            raise RequestError(f"pass {name}", f"required option=value, got {option!r}", f"options: {choices}")
        values[key] = _parse_option(f"pass {name}, option {key}", hints[key], value)
    return cls(**values)


def _parse_option(where: str, hint: Any, text: str) -> object:
    """The value of type `hint` that `text` means; a tuple's items are separated by ``|``."""
    choices = {str(choice): choice for choice in typing.get_args(hint)}
    if typing.get_origin(hint) is typing.Literal:
        if text not in choices:
            raise RequestError(where, f"required one of {', '.join(choices)}, got {text!r}")
        return choices[text]
    given = tuple(filter(None, text.split("|"))) if typing.get_origin(hint) is tuple else text
    try:
        return TypeAdapter(hint).validate_python(given)
    except ValidationError as error:
        raise RequestError(where, f"{error.errors()[0]['msg']}, got {text!r}") from error


def run_pipeline(model: ir.Model, passes: Iterable[GraphPass], after_each: AfterEach | None = None) -> PipelineReport:
    """Run `passes` on `model` in place, verifying the graph after each.

    Args:
        after_each: called with the pass, the verified model and what was done: dump, time, explain.

    Raises:
        PassError: a pass refused the graph or left an invalid one; the message names it and those before it.
    """
    runs: list[PassRun] = []
    for graph_pass in passes:
        run = _run_one(model, graph_pass, tuple(run.spec for run in runs))
        runs.append(run)
        if after_each is not None:
            after_each(graph_pass, model, run)
    return PipelineReport(tuple(runs))


def _run_one(model: ir.Model, graph_pass: GraphPass, before: tuple[str, ...]) -> PassRun:
    already = f"passes already run: {', '.join(before) or 'none'}"
    start = time.perf_counter()
    try:
        result = graph_pass(model)
        done = time.perf_counter()
        verify_graph(model)
    except DscError as error:
        raise PassError(f"pass {graph_pass}", str(error), already) from error
    except Exception as bug:
        # A bug keeps its type and traceback; the reader still needs to know which pass it happened in.
        bug.add_note(f"in pass {graph_pass}; {already}")
        raise
    return PassRun(
        spec=str(graph_pass),
        seconds=done - start,
        verify_seconds=time.perf_counter() - done,
        fired=result.fired,
        skipped=result.skipped,
    )
