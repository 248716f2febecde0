"""Bounded, exact JSON: how every JSON member of a bundle is read and written.

Reading refuses duplicate keys, NaN and infinities, unknown fields, wrong types, deep nesting, and anything
larger than the limits below before it is parsed. Writing is canonical: one value, one byte string.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, Final, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from dsc.bundle_schema.bundle_errors import (
    DuplicateKey,
    InvalidField,
    MalformedJson,
    OversizedJson,
    UnsupportedSchema,
)
from dsc.bundle_schema.errors import DscError

MAX_JSON_NBYTES: Final = 4 * 2**20
MAX_JSON_VALUES: Final = 2**16
MAX_JSON_OBJECTS: Final = 2**14
MAX_JSON_KEYS: Final = 2**10
"""Bounds of a member and (keys) of one object. A value may cost the parsers 600 bytes, an object 1,800, a wrong
field 1,100: the bounds keep a hostile member under 64 MiB."""

_MAX_ERRORS: Final = 1000
_Model = TypeVar("_Model", bound=BaseModel)
_HEADER_KEYS = frozenset({"schema_version", "created_by", "dsc"})


def parse_strict(
    model: type[_Model],
    data: bytes,
    where: str,
    reads: str,
    field_error: type[DscError] = InvalidField,
) -> _Model:
    """Parse one JSON member.

    Args:
        model: the member's type; its top level has a field ``schema_version``.
        data: UTF-8 JSON.
        where: the member's name, for errors.
        reads: ``major.minor`` that this code writes. Another major is refused; fields that this code does
            not know are tolerated only when the member's minor is newer.
        field_error: the error to raise for a field.

    Raises:
        OversizedJson, MalformedJson, DuplicateKey, UnsupportedSchema: as they say.
        DscError: of type `field_error`, when a field is missing, unknown or wrong.
    """
    header = _scan(data, where)
    newer = _is_newer_minor(header, where, reads)
    try:
        return model.model_validate_json(data, extra="ignore" if newer else None)
    except ValidationError as error:
        if error.error_count() > _MAX_ERRORS:  # listing them would cost more than the member
            raise field_error(where, f"{error.error_count()} fields are wrong") from None
        first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise MalformedJson(where, first["msg"]) from None
        raise field_error(*_describe(where, first, error.error_count())) from None


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object of any keys, within the same bounds.

    Raises:
        OversizedJson, MalformedJson, DuplicateKey: as they say.
    """
    _scan(data, where)
    value = json.loads(data)
    if not isinstance(value, dict):
        raise MalformedJson(where, f"an object is required, got {type(value).__name__}")
    return value


def dump_canonical(model: BaseModel) -> bytes:
    """UTF-8 JSON with sorted keys, one space of indentation and shortest round-trip floats."""
    value = model.model_dump(mode="json")
    text = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def _describe(where: str, first: Any, count: int) -> tuple[str, str]:
    path = ".".join(str(part) for part in first["loc"])
    more = f", and {count - 1} more" if count > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"{where}: {path}", f"no such field{more}"
    got = "" if first["type"] in ("missing", "value_error") else f", got {str(first['input'])[:80]!r}"
    return (f"{where}: {path}" if path else where), f"{first['msg'].removeprefix('Value error, ')}{got}{more}"


def _scan(data: bytes, where: str) -> dict[str, Any]:
    """Check size, duplicate keys and finite numbers, which pydantic does not; returns the version keys."""
    if len(data) > MAX_JSON_NBYTES:
        raise OversizedJson(where, f"at most {MAX_JSON_NBYTES} bytes are allowed, got {len(data)}")
    n_objects = data.count(b"{")
    n_values = data.count(b",") + data.count(b"[") + n_objects
    if n_values > MAX_JSON_VALUES or n_objects > MAX_JSON_OBJECTS:
        limits = f"{MAX_JSON_VALUES} values, {MAX_JSON_OBJECTS} of them objects,"
        raise OversizedJson(where, f"at most {limits} are allowed, got about {n_values} and {n_objects}")

    def check_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any] | None:
        if len(pairs) > MAX_JSON_KEYS:
            raise OversizedJson(where, f"an object may have {MAX_JSON_KEYS} keys at most, got {len(pairs)}")
        if len(dict(pairs)) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise DuplicateKey(where, f"every key of an object must be there once, got {twice!r} twice")
        # Only the version survives: the whole tree would cost several times the member's size.
        return {key: value for key, value in pairs if key in _HEADER_KEYS} or None

    def refuse(text: str) -> NoReturn:
        raise MalformedJson(where, f"numbers must be finite, got {text[:40]}")

    def to_float(text: str) -> float:
        value = float(text)
        return value if isfinite(value) else refuse(text)

    try:
        top = json.loads(data.decode(), object_pairs_hook=check_keys, parse_constant=refuse, parse_float=to_float)
    except (ValueError, RecursionError) as error:
        raise MalformedJson(where, f"valid JSON is required: {error}") from None
    return top if isinstance(top, dict) else {}


def _is_newer_minor(header: dict[str, Any], where: str, reads: str) -> bool:
    version = header.get("schema_version")
    parts = version.split(".") if isinstance(version, str) and len(version) <= 16 else []
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise UnsupportedSchema(where, f"schema_version as 'major.minor' is required, got {str(version)[:40]!r}")
    major, minor = (int(part) for part in parts)
    own_major, own_minor = (int(part) for part in reads.split("."))
    if major != own_major:
        created_by = header.get("created_by")
        writer = created_by.get("dsc") if isinstance(created_by, dict) else None
        raise UnsupportedSchema(
            where,
            f"written by dsc {str(writer or 'of unknown version')[:40]} with schema {version}, "
            f"this dsc reads schema {own_major}.x",
            "upgrade dsc" if major > own_major else "compile the model again with this dsc",
        )
    return minor > own_minor
