"""Text to token ids and back: encoding, streaming decoding, chat messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from dsc.bundle_schema.errors import ConfigError, GenerationError
from dsc.bundle_schema.packed_vocabulary import TOKENIZER_NAME, unpack_tokenizer
from dsc.runtime.chat_template import ChatTemplate, Message

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextCodec:
    """A tokenizer with its chat template, made from a bundle's tokenizer files.

    Args:
        files: file name -> content; tokenizer.json is required, tokenizer_config.json and chat_template.jinja are
            read when they are there.

    Raises:
        ConfigError: tokenizer.json is missing or cannot be read, or tokenizer_config.json is no JSON object.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.tokenizer = load_tokenizer(files)
        self._config = _json_object(files, "tokenizer_config.json")
        self._template_source = _template_source(files, self._config)
        added = self.tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token for token, facts in added.items() if facts.special)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""
        return self._template_source is not None

    def encode(self, text: str, add_special_tokens: bool = True, parse_special_tokens: bool = True) -> list[int]:
        """The ids of a text.

        Args:
            text: any string; a lone surrogate becomes a question mark.
            add_special_tokens: put begin and end tokens where the tokenizer wants them.
            parse_special_tokens: read ``<|im_end|>`` and its like as the token; otherwise as plain characters, for
                text from an untrusted source.
        """
        tokenizer = self.tokenizer if parse_special_tokens else self._plain
        text = text.encode("utf-8", "replace").decode("utf-8")
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are no character become U+FFFD, ids without a token nothing."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(self, skip_special_tokens: bool = True) -> TokenStream:
        """A decoder for one output."""
        return TokenStream(self.tokenizer, self._special_ids if skip_special_tokens else frozenset())

    def chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """The ids of messages put through the template, ready for an answer.

        Raises:
            GenerationError: there is no template, or it fails on these messages.
        """
        return self.encode(self.render(messages, **variables), add_special_tokens=False)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of messages put through the chat template.

        Args:
            messages: mappings with ``role`` and ``content``.
            add_generation_prompt: end with the beginning of an answer.
            variables: further names for the template, e.g. ``tools``.

        Raises:
            GenerationError: there is no template, it is malformed, or it refuses these messages.
        """
        return self._template.render(messages, add_generation_prompt, variables)

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._template_source is None:
            raise GenerationError(
                "chat template",
                "messages need a template, the tokenizer has none",
                "give the prompt as text (`dsc run --raw`, `dsc bench --raw`)",
            )
        named = ((name, _token_text(value)) for name, value in self._config.items() if name.endswith("_token"))
        return ChatTemplate(self._template_source, {name: text for name, text in named if text is not None})

    @cached_property
    def _plain(self) -> Tokenizer:
        """The tokenizer that knows no special tokens; a copy, since the switch is state shared by all threads."""
        plain = Tokenizer.from_str(self.tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain


class TokenStream:
    """Decodes one output token by token: the pieces joined are the text of all tokens decoded at once.

    Never gives half a character. A token's text depends on its neighbours (a leading space, a character of several
    tokens), so the latest tokens are decoded with and without the new ones, and the difference is what these add.

    Args:
        tokenizer: the tokenizer.
        skipped: ids that leave no text.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._ids: list[int] = []  # tokens already shown, as context, then those not shown yet
        self._n_shown = 0
        self._shown = ""

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        spelling = self._tokenizer.id_to_token(token)
        if spelling is None or token in self._skipped:
            return ""
        self._ids.append(token)
        if _BYTE_TOKEN.fullmatch(spelling):  # one bad byte makes the whole run of byte tokens unreadable
            return ""
        text = self._decode()
        if text.endswith(_INCOMPLETE) or text == self._shown or not text.startswith(self._shown):
            return ""
        piece = text[len(self._shown) :]
        self._ids = self._ids[self._n_shown :]
        self._n_shown = len(self._ids)
        self._shown = self._decode()
        return piece

    def keep(self, token: int) -> None:
        """A token whose text nobody reads before the end: `finish` gives it."""
        if token not in self._skipped:
            self._ids.append(token)

    def finish(self) -> str:
        """What is left; an incomplete character becomes U+FFFD as in `TextCodec.decode`."""
        piece = self._decode()[len(self._shown) :]
        self._ids, self._n_shown, self._shown = [], 0, ""
        return piece

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=False))


def load_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer of tokenizer.json, packed or not.

    Raises:
        ConfigError: the file is missing or cannot be read.
    """
    if TOKENIZER_NAME not in files:
        raise ConfigError(TOKENIZER_NAME, "the file is required, it is missing", "compile from a source that has it")
    try:
        tokenizer = Tokenizer.from_buffer(unpack_tokenizer(files))
    except Exception as error:  # the library raises plain Exception for malformed input
        raise ConfigError(TOKENIZER_NAME, f"the tokenizer cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(name, f"the file is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(name, f"a JSON object is required, got {type(content).__name__}")
    return content


def _template_source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    """The template from its own file, else from the configuration: a text, or several of which one is the default."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode("utf-8", "replace")
    source = config.get("chat_template")
    if isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = entries[-1].get("template") if entries else None
    return source if isinstance(source, str) else None


def _token_text(value: Any) -> str | None:
    """A special token as the configuration writes it: its text, or an object with ``content``."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
