"""A chat of several turns over one cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsc.bundle_schema.errors import RequestError
from dsc.runtime.arguments import whole_number
from dsc.runtime.request import GenerationResult, Message

if TYPE_CHECKING:
    from dsc.runtime.generate import SpeculativeModel


class Conversation:
    """Messages so far; each turn is generated from all of them, and only what is new is read.

    A turn gives what a fresh run on the same messages gives: the cache only saves time. If another conversation has had
    the model meanwhile, its turn saved this one's rows; after any other generation the messages are read again.
    """

    def __init__(self, model: SpeculativeModel, messages: Sequence[Message] = ()) -> None:
        self._model = model
        self.messages: list[Message] = list(messages)

    def send(self, text: str, **options: Any) -> GenerationResult:
        """Add a user's message and the model's answer; `options` are those of `SpeculativeModel.generate`.

        A turn that fails leaves the messages as they were.

        Raises:
            RequestError: `text` is no text.
        """
        if not isinstance(text, str):
            raise RequestError("text", f"a text is required, got {text!r}")
        turn: list[Message] = [*self.messages, {"role": "user", "content": text}]
        result = self._model.stream(turn, reuse_cache=True, **options).finish()
        self.messages = [*turn, {"role": "assistant", "content": result.text}]
        return result

    def rewind(self, turns: int = 1) -> None:
        """Drop the last turns, each a user's message and its answer.

        Raises:
            RequestError: there are not so many.
        """
        answers = sum(message.get("role") == "assistant" for message in self.messages)
        if turns := whole_number(turns, "turns", 0, answers):
            del self.messages[-2 * turns :]

    def reset(self) -> None:
        """Drop every message."""
        self.messages = []
