"""Where an output ends: at a stop token, or at the token that completes a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from dsc.runtime.request import Chunk
from dsc.runtime.text import TokenStream


class Output:
    """Tokens and text of one output as its rounds come in.

    Text that may be the beginning of a stop string is held back until it is clear that it is not.

    Args:
        stop_ids: end the output; kept in its ids, not in its text.
        stop_strings: end the output; not in its text.
        text: turns tokens into text; None leaves the text empty.
    """

    def __init__(self, stop_ids: frozenset[int], stop_strings: Sequence[str], text: TokenStream | None) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.ended = False
        self._stop_ids = stop_ids
        self._stops = tuple(stop_strings)
        self._source = text
        self._held = ""

    def take(self, block: Sequence[int], read: bool = True) -> Chunk:
        """Add a round's tokens up to the end of the output; says in `ended` whether that was reached.

        Args:
            read: someone reads the chunk. What nobody reads becomes text at the end, all at once, as far as no stop
                string has to be looked for.
        """
        taken: list[int] = []
        text = ""
        for token in block:
            taken.append(token)
            if token in self._stop_ids:
                self.ended = True
                text += self._release()
            elif self._source is not None and (read or self._stops):
                text += self._add(self._source.push(token))
            elif self._source is not None:
                self._source.keep(token)
            if self.ended:
                break
        self.ids += taken
        self.text += text
        return Chunk(text, tuple(taken))

    def finish(self) -> Chunk:
        """What was held back, when the output ended by its length."""
        text = "" if self.ended else self._release()
        self.text += text
        return Chunk(text, ())

    def _release(self) -> str:
        text = self._add(self._source.finish() if self._source is not None else "")
        held, self._held = self._held, ""
        return text + held

    def _add(self, piece: str) -> str:
        """Text that may be shown now that `piece` has come."""
        held = self._held + piece
        cuts = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if cuts:
            self.ended = True
            self._held = ""
            return held[: min(cuts)]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a stop string begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
