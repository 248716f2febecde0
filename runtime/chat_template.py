"""Render chat templates as `transformers` does, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dsc.bundle_schema.errors import GenerationError

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template.

    Args:
        source: jinja2 text.
        special_tokens: names the template may use, e.g. ``bos_token`` -> its text.

    Raises:
        GenerationError: the text is no jinja2 template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._names = {"tools": None, "documents": None, **special_tokens}
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise GenerationError("chat template", f"it is not valid: {error}") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """The text of these messages.

        Raises:
            GenerationError: the template refuses them or fails on them.
        """
        try:
            return self._template.render(
                {**self._names, **variables},
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise GenerationError("chat template", f"the messages cannot be rendered: {error}") from error


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's part for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja2's escaping of HTML characters, which a model has not seen in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
