"""What a caller asks of one generation, checked, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsc.bundle_schema.errors import GenerationError, RequestError
from dsc.runtime.arguments import whole_number
from dsc.runtime.decode import LogitsHook
from dsc.runtime.sampling import SamplingParams
from dsc.runtime.speculator import SpeculationOptions
from dsc.runtime.stats import GenerationStats
from dsc.runtime.trace import TraceTarget

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
FinishReason = Literal["stop", "length", "cancelled", "time"]


@dataclass(frozen=True)
class Request:
    """One checked generation request.

    Attributes:
        ids: the prompt.
        max_tokens: prompt and output together.
        stop_ids: tokens that end the output; they are part of the ids and not of the text.
        stop_strings: texts that end the output; they are cut from the text.
        reuse_cache: start from what the caches hold of this prompt; None leaves it to the configuration.
        trace: where the rounds are recorded.
    """

    ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    speculation: SpeculationOptions | None
    processors: tuple[LogitsHook, ...]
    reuse_cache: bool | None = None
    trace: TraceTarget | None = None


@dataclass(frozen=True)
class Chunk:
    """What one round added to a stream: whole characters of text, and the tokens behind them."""

    text: str
    ids: tuple[int, ...]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class GenerationResult:
    """A finished generation.

    Attributes:
        text: the output's text without stop tokens and stop strings; empty when the bundle has no tokenizer.
        ids: every token of the output; one that ended it is the last.
        finish_reason: ``stop``, or ``length`` when the token limit or the cache was reached; in an engine also
            ``cancelled``, and ``time`` when the request's time limit was.
        prompt_ids: the prompt as the model read it.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_ids: tuple[int, ...]
    stats: GenerationStats


def chat_messages(prompt: Any) -> list[Message] | None:
    """The messages of a chat prompt, None when it holds none.

    Raises:
        RequestError: a message outside a list, a list of messages and other things, or a message without a role.
    """
    if isinstance(prompt, Mapping):
        raise RequestError("prompt", "messages come in a list, got a single mapping")
    if not isinstance(prompt, list | tuple) or not any(isinstance(item, Mapping) for item in prompt):
        return None
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"prompt message {index}", f"a mapping with a role is required, got {message!r}")
    return list(prompt)


def check_prompt(ids: Sequence[int], vocab_size: int, max_length: int) -> tuple[int, ...]:
    """The prompt's ids.

    Raises:
        GenerationError: empty, too long for at least one new token, or an id that the model has not.
    """
    if not ids:
        raise GenerationError("prompt", "at least one token is required, got none")
    if len(ids) >= max_length:
        raise GenerationError(
            "prompt",
            f"at most {max_length - 1} tokens leave room for an answer in {max_length}, got {len(ids)}",
            "shorten it, or compile with a larger maximum length",
        )
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise GenerationError(f"prompt token {index}", f"an id below {vocab_size} is required, got {token}")
    return tuple(ids)


def token_limit(n_prompt: int, max_new_tokens: int | None, max_length: int) -> int:
    """Most tokens that prompt and output may have together.

    Raises:
        RequestError: fewer than one new token was asked for, or no whole number.
    """
    if max_new_tokens is None:
        return max_length
    return min(n_prompt + whole_number(max_new_tokens, "max_new_tokens", 1), max_length)
