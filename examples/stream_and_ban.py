"""Stream a generation token by token, with a logits processor that bans tokens inside drafted blocks as well.

Usage: ``python examples/stream_and_ban.py BUNDLE [PROMPT]``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsc.runtime import load


class Ban:
    """Forbids some token ids. Row i of a block follows all tokens so far and the first i drafts."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)

    def __call__(self, logits: NDArray[np.float32], tokens: Sequence[int], drafts: Sequence[int]) -> None:
        logits[:, self._ids] = -np.inf


def main(bundle: str, prompt: str) -> None:
    model = load(bundle)
    free = model.generate(prompt, max_new_tokens=24)
    banned = sorted(set(free.ids))[:3]
    options: dict[str, Any] = {"max_new_tokens": 24, "processors": [Ban(banned)]}
    for chunk in model.stream(prompt, **options):
        print(chunk.text, end="", flush=True)
    fast = model.generate(prompt, **options)
    plain = model.generate(prompt, speculation="off", **options)
    again = sorted(set(fast.ids) & set(banned))
    print(f"\nbanned {banned}: found again {again}, as plain decoding: {fast.ids == plain.ids}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "the cat and the dog and the cat and")
