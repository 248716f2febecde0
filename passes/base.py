"""What a graph pass is: a frozen dataclass whose fields are its options and whose call rewrites a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import onnx_ir as ir


@dataclass(frozen=True)
class Reason:
    """Why a rule left a place of the graph as it was.

    Attributes:
        rule: number or short name of the rule, as in the pass's docstring.
        where: the node, value or initializer concerned.
        why: what was required and what was found.
    """

    rule: str
    where: str
    why: str

    def __str__(self) -> str:
        return f"rule {self.rule} at {self.where}: {self.why}"


@dataclass(frozen=True)
class PassResult:
    """What a pass did.

    Attributes:
        fired: how many times one of its rules changed the graph.
        skipped: the places that looked right for a rule and were left alone, with the reason.
    """

    fired: int = 0
    skipped: tuple[Reason, ...] = ()

    @property
    def modified(self) -> bool:
        """Whether the graph differs from what was given."""
        return self.fired > 0


@dataclass(frozen=True)
class GraphPass(ABC):
    """A rewrite of an `onnx_ir.Model` in place: a valid graph in, a valid graph out.

    A concrete pass is a frozen dataclass; its fields are its options, so that ``name{option=value}`` is both
    how it is asked for and how it is shown. Its docstring has a block ``before -> after`` and numbered rules.
    A field that text cannot hold (a table of tensors) is marked ``metadata=PROGRAM_ONLY``.
    """

    name: ClassVar[str]

    def __call__(self, model: ir.Model) -> PassResult:
        """Check the precondition, run the pass, check the postcondition.

        Raises:
            PassError: the model is not what the pass requires, or the pass did not reach what it ensures.
        """
        self.requires(model)
        result = self.call(model)
        self.ensures(model)
        return result

    @abstractmethod
    def call(self, model: ir.Model) -> PassResult:
        """Rewrite `model` in place and say what happened."""

    def requires(self, model: ir.Model) -> None:  # noqa: B027 - most passes take any valid graph
        """Raise `PassError` when `model` cannot be given to this pass."""

    def ensures(self, model: ir.Model) -> None:  # noqa: B027
        """Raise `PassError` when `model` is not what this pass promises."""

    def __str__(self) -> str:
        options = [
            f"{field.name}={_as_text(getattr(self, field.name))}"
            for field in fields(self)
            if field.metadata != PROGRAM_ONLY and getattr(self, field.name) != field.default
        ]
        return f"{self.name}{{{','.join(options)}}}" if options else self.name


PROGRAM_ONLY: dict[str, Any] = {"text": False}


def _as_text(value: object) -> str:
    if isinstance(value, tuple):
        return "|".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
