"""Every error that dsc raises for a user's input or environment.

An error says where it happened, what was required and what was got, and what to do: ``where: what (hint)``.
Anything that is not a `DscError` is a bug of dsc and keeps its traceback.
"""

from __future__ import annotations

from typing import ClassVar


class DscError(Exception):
    """A problem that the user can act on.

    Args:
        where: the file, member, field, node, option or token concerned.
        what: what was required and what was got.
        hint: what to do about it.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, where: str, what: str, hint: str = "") -> None:
        super().__init__(where, what, hint)
        self.where = where
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}"
        return f"{text} ({self.hint})" if self.hint else text


class RequestError(DscError):
    """An option, recipe field or argument is wrong."""


class ModelError(DscError):
    """A model directory, GGUF file or ONNX pair cannot be read or cannot be expressed exactly."""


class PairError(DscError):
    """Target and draft do not fit together."""


class PassError(DscError):
    """A graph pass failed or left an invalid graph."""


class PlanError(DscError):
    """A KV plan is inconsistent or does not fit."""


class BundleError(DscError):
    """A bundle file is malformed, changed or not readable by this version."""


class KernelError(DscError):
    """A requested kernel cannot be built, found or launched."""


class ConfigError(DscError):
    """A DFlash configuration value is unknown or out of range."""


class GenerationError(DscError):
    """A generation request cannot be served."""


class CheckFailed(DscError):  # noqa: N818 - the outcome of a check, reported as one
    """A check ran to its end and its verdict is no."""

    exit_code: ClassVar[int] = 1


class HostError(DscError):
    """The machine or its installation lacks something that was asked for."""

    exit_code: ClassVar[int] = 3
