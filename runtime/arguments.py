"""Checks of what callers pass: each names the argument, what it must be and what was got."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dsc.bundle_schema.errors import RequestError


def whole_number(value: Any, where: str, low: int, high: int | None = None, hint: str = "") -> int:
    """An integer of Python's or NumPy's, within bounds; 2.5, True and "2" are none.

    Raises:
        RequestError: it is no integer, or is out of bounds.
    """
    number = _integer(value)
    if number is None:
        raise RequestError(where, f"a whole number is required, got {_shown(value)}")
    if number < low:
        raise RequestError(where, f"at least {low} is required, got {_shown(number)}", hint)
    if high is not None and number > high:
        raise RequestError(where, f"at most {high} is allowed, got {_shown(number)}", hint)
    return number


def token_ids(value: Any, where: str) -> list[int]:
    """Token ids of any sequence of integers, not compared with a vocabulary.

    Raises:
        RequestError: it is no sequence, or an item is no integer; names the first such item.
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(where, f"a sequence of token ids is required, got {_shown(value)}")
    ids = []
    for index, token in enumerate(value):
        number = _integer(token)
        if number is None:
            raise RequestError(f"{where} token {index}", f"a whole number is required, got {_shown(token)}")
        ids.append(number)
    return ids


def stop_tokens(value: Any, vocab_size: int) -> tuple[int, ...]:
    """The ids of `stop_tokens`.

    Raises:
        RequestError: an item is no id of the vocabulary, so that it could never come.
    """
    ids = token_ids(value, "stop_tokens")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError("stop_tokens", f"ids below {vocab_size} are required, got {_shown(token)}")
    return tuple(ids)


def stop_texts(value: Any) -> tuple[str, ...]:
    """The texts of `stop`: one, or a sequence of them.

    Raises:
        RequestError: something else, or an empty text, which would end every output before it begins.
    """
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError("stop", f"a text or a sequence of texts is required, got {_shown(value)}")
    texts = (value,) if isinstance(value, str) else tuple(value)
    for text in texts:
        if not isinstance(text, str):
            raise RequestError("stop", f"texts are required, got {_shown(text)}", "stop_tokens takes ids")
        if not text:
            raise RequestError("stop", "texts of at least one character are required, got an empty one")
    return texts


def file_path(value: Any, where: str) -> Path:
    """A path.

    Raises:
        RequestError: it is none.
    """
    try:
        return Path(value)
    except TypeError:
        raise RequestError(where, f"a path is required, got {_shown(value)}") from None


def flag(value: Any, where: str) -> bool:
    """A truth value; a text that says "no" is none.

    Raises:
        RequestError: it is none.
    """
    if not isinstance(value, bool):
        raise RequestError(where, f"True or False is required, got {_shown(value)}")
    return value


def number(value: Any) -> Any:
    """For fields of pydantic's: refuse a text or a truth value, which it takes for a number.

    Raises:
        ValueError: it is one of them.
    """
    if isinstance(value, bool | str):
        raise ValueError("a number is required")  # noqa: TRY004 - what pydantic reports
    return value


def callables(value: Any, where: str) -> tuple[Callable[..., None], ...]:
    """A sequence of functions.

    Raises:
        RequestError: it is no sequence, or an item cannot be called.
    """
    if not isinstance(value, Iterable):
        raise RequestError(where, f"a sequence of functions is required, got {_shown(value)}")
    functions = tuple(value)
    for function in functions:
        if not callable(function):
            raise RequestError(where, f"functions are required, got {_shown(function)}")
    return functions


def _integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _shown(value: Any) -> str:
    """The value's text, cut where a long one would hide the message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
