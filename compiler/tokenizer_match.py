"""Whether two tokenizers are the same by what they do, whatever their files look like."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from tokenizers import Tokenizer

from dsc.bundle_schema.tensors import StrictModel
from dsc.runtime.text import load_tokenizer

MAX_DIFFERENCES = 64

Relation = Literal["identical", "padded", "mapped", "different"]

# Texts on which two tokenizers with one vocabulary can still differ: spaces, digits, scripts, emoji, code, newlines.
SAMPLES = (
    "Hello, world! It's 12345.678 and they'll pay $99.",
    "  leading,  double   and trailing spaces  ",
    "def f(x):\n    return {'a': [1, 2], \"b\": x ** 2}\n\n\tprint(f(3))",
    "naïve café – Ünïcödé, Москва, 東京, العربية, हिन्दी",
    "👩‍👩‍👧‍👦 🇪🇺 e\u0301 \ufb01 ½ ①\r\n\u00a0x",
    "https://example.org/a?b=c&d=%20#e CamelCase snake_case 0xFF 1e-9",
    "",
)


class TokenDifference(StrictModel):
    """One id whose token differs; None where a side has no such id."""

    id: int
    target: str | None
    draft: str | None


class TokenizerVerdict(StrictModel):
    """How a draft's token ids relate to a target's.

    Attributes:
        relation: ``identical``; ``padded`` when one side only has more ids at the end or in gaps; ``mapped`` when one
            side lacks added tokens of the other; ``different`` when they cannot be paired.
        n_target, n_draft: one more than each side's highest id.
        n_shared: ids below this mean the same on both sides; a draft proposes only such, the target may emit others.
        reason: why they are different, empty otherwise.
        notes: what differs though they can be paired.
        differences: the differing ids, at most `MAX_DIFFERENCES`.
        target_only, draft_only: ids of tokens that the other side has not, at most `MAX_DIFFERENCES`.
    """

    relation: Relation
    n_target: int
    n_draft: int
    n_shared: int
    reason: str = ""
    notes: tuple[str, ...] = ()
    differences: tuple[TokenDifference, ...] = ()
    target_only: tuple[int, ...] = ()
    draft_only: tuple[int, ...] = ()

    @property
    def compatible(self) -> bool:
        """Whether the draft can propose tokens for the target."""
        return self.relation != "different"

    @property
    def summary(self) -> str:
        """The verdict for people, in one line."""
        return "; ".join(filter(None, (self.relation, self.reason, *self.notes)))


class TextDifference(StrictModel):
    """A stretch of a text that the two sides cut differently or number differently."""

    text: str
    target_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]


def match_tokenizers(target_files: Mapping[str, bytes], draft_files: Mapping[str, bytes]) -> TokenizerVerdict:
    """Compare what ids mean, then how sample texts are cut.

    Raises:
        ConfigError: a tokenizer.json is missing or cannot be read.
    """
    return _match(load_tokenizer(target_files), load_tokenizer(draft_files))


def compare_on_text(
    draft_files: Mapping[str, bytes], target_files: Mapping[str, bytes], text: str
) -> tuple[TextDifference, ...]:
    """Every stretch of `text` whose tokens differ, with both sides' ids.

    Raises:
        ConfigError: a tokenizer.json is missing or cannot be read.
    """
    return _differences_on_text(load_tokenizer(draft_files), load_tokenizer(target_files), text)


def _match(target: Tokenizer, draft: Tokenizer) -> TokenizerVerdict:
    sides = _spellings(target), _spellings(draft)
    target_tokens, draft_tokens = sides
    n_target, n_draft = (max(side, default=-1) + 1 for side in sides)
    shared = target_tokens.keys() & draft_tokens.keys()
    differing = sorted(token for token in shared if target_tokens[token] != draft_tokens[token])
    target_only = sorted(target_tokens.keys() - draft_tokens.keys())
    draft_only = sorted(draft_tokens.keys() - target_tokens.keys())
    reason = _first_difference(differing, target_tokens, draft_tokens)
    reason = reason or _moved(target_only, draft_only, target_tokens, draft_tokens)
    reason = reason or _cut_differently(draft, target, {*target_only, *draft_only})
    missing = _named(target_only, target_tokens, target) or _named(draft_only, draft_tokens, draft)
    relation: Relation = "identical"
    if reason:
        relation = "different"
    elif missing:
        relation = "mapped"
    elif target_only or draft_only:
        relation = "padded"
    return TokenizerVerdict(
        relation=relation,
        n_target=n_target,
        n_draft=n_draft,
        n_shared=min([n_target, n_draft, *differing[:1]]),
        reason=reason,
        notes=_notes(target, draft, target_only, draft_only),
        differences=tuple(
            TokenDifference(id=token, target=target_tokens[token], draft=draft_tokens[token])
            for token in differing[:MAX_DIFFERENCES]
        ),
        target_only=tuple(target_only[:MAX_DIFFERENCES]),
        draft_only=tuple(draft_only[:MAX_DIFFERENCES]),
    )


def _spellings(tokenizer: Tokenizer) -> dict[int, str]:
    """Id -> token, added tokens included."""
    return {token: text for text, token in tokenizer.get_vocab(with_added_tokens=True).items()}


def _first_difference(differing: list[int], target: dict[int, str], draft: dict[int, str]) -> str:
    if not differing:
        return ""
    first = differing[0]
    return (
        f"{len(differing)} ids mean different tokens, first {first}: {target[first]!r} in the target, "
        f"{draft[first]!r} in the draft"
    )


def _moved(target_only: list[int], draft_only: list[int], target: dict[int, str], draft: dict[int, str]) -> str:
    """A token that both sides have under different ids."""
    by_text = {target[token]: token for token in target_only}
    for token in draft_only:
        if draft[token] in by_text:
            return f"token {draft[token]!r} has id {by_text[draft[token]]} in the target, {token} in the draft"
    return ""


def _cut_differently(draft: Tokenizer, target: Tokenizer, one_sided: set[int]) -> str:
    """A sample text whose ids differ though every id means the same, apart from tokens that only one side has."""
    for text in SAMPLES:
        found = _differences_on_text(draft, target, text)
        real = next((item for item in found if not one_sided & {*item.target_ids, *item.draft_ids}), None)
        if real is not None:
            return (
                f"the text {real.text!r} is cut into ids {list(real.target_ids)} by the target, "
                f"{list(real.draft_ids)} by the draft"
            )
    return ""


def _added(tokenizer: Tokenizer) -> dict[int, Any]:
    return dict(tokenizer.get_added_tokens_decoder())


def _named(ids: list[int], tokens: dict[int, str], tokenizer: Tokenizer) -> list[str]:
    """The added tokens among these ids; others are padding of the vocabulary."""
    added = _added(tokenizer)
    return [tokens[token] for token in ids if token in added]


def _notes(target: Tokenizer, draft: Tokenizer, target_only: list[int], draft_only: list[int]) -> tuple[str, ...]:
    notes = []
    for ids, tokenizer, other in ((target_only, target, "draft"), (draft_only, draft, "target")):
        if ids:
            tokens = _spellings(tokenizer)
            shown = ", ".join(repr(tokens[token]) for token in ids[:4])
            notes.append(f"{len(ids)} tokens are not known to the {other}: {shown}{', ...' if len(ids) > 4 else ''}")
    target_added, draft_added = _added(target), _added(draft)
    unlike = [
        token for token in target_added.keys() & draft_added.keys()
        if target_added[token].special != draft_added[token].special
    ]  # fmt: skip
    unlike += [token for token in target_added.keys() ^ draft_added.keys() if token not in {*target_only, *draft_only}]
    if unlike:
        shown = ", ".join(repr(target.id_to_token(token)) for token in sorted(unlike)[:4])
        notes.append(f"{len(unlike)} tokens are special on one side only: {shown}")
    return tuple(notes)


def _differences_on_text(draft: Tokenizer, target: Tokenizer, text: str) -> tuple[TextDifference, ...]:
    """The stretches between common boundaries where the ids are not the same."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    pieces = [_pieces(tokenizer, text) for tokenizer in (target, draft)]
    common = sorted({0, len(text)} | ({end for _, end, _ in pieces[0]} & {end for _, end, _ in pieces[1]}))
    found = []
    for start, end in pairwise(common):
        target_ids, draft_ids = (tuple(token for _, stop, token in side if start < stop <= end) for side in pieces)
        if target_ids != draft_ids:
            found.append(TextDifference(text=text[start:end], target_ids=target_ids, draft_ids=draft_ids))
    return tuple(found)


def _pieces(tokenizer: Tokenizer, text: str) -> list[tuple[int, int, int]]:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return [(start, end, token) for (start, end), token in zip(encoding.offsets, encoding.ids, strict=True)]
