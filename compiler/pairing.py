"""Put a target and a draft together: the one thing that must fit is what token ids mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsc.bundle_schema.errors import ConfigError, PairError
from dsc.bundle_schema.manifest import TokenizerEntry
from dsc.compiler.tokenizer_match import TokenizerVerdict, match_tokenizers


@dataclass(frozen=True)
class Pairing:
    """How the draft's logits relate to the target's.

    Attributes:
        verdict: of the tokenizers; None when neither model has one.
        n_shared: ids below this may be proposed: both models have logits for them and they mean the same.
        target_width, draft_width: logits of a row, padding included.
    """

    verdict: TokenizerVerdict | None
    n_shared: int
    target_width: int
    draft_width: int

    @property
    def relation(self) -> str:
        """The tokenizers' relation, where unequal widths of the logits count as padding."""
        found = self.verdict.relation if self.verdict else "identical"
        return "padded" if found == "identical" and self.target_width != self.draft_width else found

    def entry(self, members: tuple[str, ...]) -> TokenizerEntry:
        """The manifest's record of it."""
        notes = [self.verdict.summary if self.verdict else "no tokenizer"]
        if self.target_width != self.draft_width:
            notes.append(f"{self.target_width} logits in the target, {self.draft_width} in the draft")
        if self.n_shared < max(self.target_width, self.draft_width):
            notes.append(f"ids below {self.n_shared} are proposed")
        return TokenizerEntry(members=members, verdict=self.relation, summary="; ".join(notes))


def pair(
    target_files: Mapping[str, bytes], draft_files: Mapping[str, bytes], target_width: int, draft_width: int
) -> Pairing:
    """Decide whether a draft fits a target.

    Args:
        target_files: the target's tokenizer files; empty when it has none.
        draft_files: the draft's.
        target_width: logits of a row of the target.
        draft_width: of the draft; either may be the larger.

    Raises:
        PairError: the tokenizers differ, or one is missing or cannot be read.
    """
    if bool(target_files) != bool(draft_files):
        side = "draft" if target_files else "target"
        raise PairError(side, "target and draft must both have a tokenizer to compare, this one has none")
    widths = min(target_width, draft_width)
    if not target_files:
        if target_width != draft_width:
            raise PairError("draft", f"without tokenizers {target_width} logits are required, got {draft_width}")
        return Pairing(None, widths, target_width, draft_width)
    try:
        verdict = match_tokenizers(target_files, draft_files)
    except ConfigError as error:
        raise PairError("draft", f"the tokenizers cannot be compared: {error}") from error
    if not verdict.compatible:
        raise PairError(
            "draft",
            f"the target's tokenizer is required, {verdict.reason}",
            "use a draft that was made for this target",
        )
    return Pairing(verdict, min(widths, verdict.n_shared), target_width, draft_width)
