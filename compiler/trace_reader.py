"""Reads the traces that `generate(trace=...)` writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dsc.bundle_schema.errors import RequestError
from dsc.runtime.trace import TRACE_SCHEMA

Ids = list[Annotated[int, Field(ge=0, lt=2**31)]]


class _Line(BaseModel):
    # Later minor versions may say more; what is read here must be there.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class RequestLine(_Line):
    """What was asked."""

    event: Literal["request"]
    schema_version: str
    name: str = ""  # schema 1.0 has neither
    model: str = ""
    policy: str
    speculation: str
    max_tokens: int
    stop_ids: Ids
    prompt_ids: Annotated[Ids, Field(min_length=1)]


class RoundLine(_Line):
    """One round."""

    event: Literal["round"]
    n_tokens: Annotated[int, Field(ge=1)]
    proposer: str
    lag: Annotated[int, Field(ge=0)] = 0
    start: Annotated[int, Field(ge=0)] = 0
    draft_ids: list[int]
    accepted: Annotated[int, Field(ge=0)]
    new_ids: Annotated[Ids, Field(min_length=1)]
    signals: dict[str, float | None] | None = None
    ms: dict[str, float]


class EndLine(_Line):
    """How it ended."""

    event: Literal["end"]
    emitted: Annotated[int, Field(ge=0)]
    finish_reason: str
    total_ms: Annotated[float, Field(ge=0)] = 0.0
    first_token_ms: Annotated[float, Field(ge=0)] = 0.0


_LINE: TypeAdapter[RequestLine | RoundLine | EndLine] = TypeAdapter(
    Annotated[RequestLine | RoundLine | EndLine, Field(discriminator="event")]
)


@dataclass
class TracedRequest:
    """One generation of a trace.

    Attributes:
        emitted: tokens of the result, or of all rounds when the trace breaks off.
        decoding_ms: from the first token to the end; 0 when the trace breaks off.
    """

    request: RequestLine
    rounds: list[RoundLine] = field(default_factory=list)
    emitted: int | None = None
    decoding_ms: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """Prompt and result."""
        new = [token for line in self.rounds for token in line.new_ids]
        return [*self.request.prompt_ids, *new[: self.emitted]]


def read_trace(path: Path) -> list[TracedRequest]:
    """The generations of a trace, in order; one whose end is missing counts as far as it goes.

    Raises:
        RequestError: the file cannot be read, or a line is not what the format says; names the line.
    """
    requests: list[TracedRequest] = []
    for where, line in _lines(path):
        if isinstance(line, RequestLine):
            if line.schema_version.partition(".")[0] != TRACE_SCHEMA.partition(".")[0]:
                raise RequestError(where, f"schema {TRACE_SCHEMA} is required, got {line.schema_version[:20]!r}")
            requests.append(TracedRequest(line))
        elif not requests:
            raise RequestError(where, f"a trace begins with a request, got {line.event!r}")
        elif isinstance(line, EndLine):
            requests[-1].emitted = line.emitted
            requests[-1].decoding_ms = line.total_ms - line.first_token_ms
        else:
            _append(requests[-1], line, where)
    found = [request for request in requests if request.rounds]
    if not found:
        raise RequestError(str(path), "at least one generation with rounds is required, got none")
    return found


def _append(request: TracedRequest, line: RoundLine, where: str) -> None:
    expected = len(request.request.prompt_ids) + sum(len(before.new_ids) for before in request.rounds)
    if line.n_tokens != expected:
        raise RequestError(where, f"a round at {expected} tokens is required, got one at {line.n_tokens}")
    if line.accepted > len(line.draft_ids):
        raise RequestError(where, f"{line.accepted} of {len(line.draft_ids)} drafts cannot have been accepted")
    request.rounds.append(line)


def _lines(path: Path) -> Iterator[tuple[str, RequestLine | RoundLine | EndLine]]:
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(str(path), f"the trace cannot be read: {error}") from error
    for number, text in enumerate(texts, 1):
        if text.strip():
            where = f"{path}, line {number}"
            yield where, _parse(text, where)


def _parse(text: str, where: str) -> Any:
    try:
        return _LINE.validate_python(json.loads(text))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        names = ".".join(map(str, first["loc"]))
        raise RequestError(f"{where}: {names}", first["msg"]) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(where, f"a JSON object is required: {error}") from None


def recorded_acceptance(request: TracedRequest, kind: str) -> dict[tuple[int, bool], bool]:
    """Position in the sequence, and whether the proposer had started late -> whether its draft was right, where it was
    judged.
    """
    known: dict[tuple[int, bool], bool] = {}
    for line in request.rounds:
        if line.proposer != kind:
            continue
        for index in range(min(line.accepted + 1, len(line.draft_ids))):
            known[line.n_tokens + index, line.start > 0] = index < line.accepted
    return known


def measured_rounds(requests: Sequence[TracedRequest]) -> Iterator[RoundLine]:
    """Rounds whose times are those of a round and not of reading a prompt."""
    return (line for request in requests for line in request.rounds if line.ms.get("forward", 0.0) > 0)
