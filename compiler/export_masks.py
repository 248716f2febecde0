"""Which keys a model lets each query see, read from the mask function it builds rather than from its name.

`transformers` composes masks from functions ``(batch, head, query, key) -> bool``. Evaluating one tells a causal mask
from a sliding window, and from everything that `VerifyAttention` cannot express.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsc.bundle_schema.errors import ModelError


@dataclass(frozen=True)
class CausalMask:
    """Query p sees the keys j with ``p - window < j <= p``; all j <= p when `window` is None."""

    window: int | None = None


def causal_mask(mask_function: Callable[..., Any], max_length: int, where: str) -> CausalMask:
    """The causal mask that `mask_function` computes for positions below `max_length`.

    Raises:
        ModelError: the mask is not causal, or causal but not a window that slides with the query (chunks, prefixes).
    """
    import torch

    keys = torch.arange(max_length)
    zero = torch.zeros((), dtype=torch.long)

    def visible(query: int) -> Any:
        seen = mask_function(zero, zero, torch.tensor(query), keys)
        return torch.as_tensor(seen).expand(max_length)

    width = int(visible(max_length - 1).sum())
    window = None if width >= max_length else width
    for query in _probes(max_length, width):
        expected = (keys <= query) & (keys > query - width)
        if not torch.equal(visible(query), expected):
            raise ModelError(
                where,
                f"attention must be causal, full or over a sliding window; position {query} of this model sees "
                f"{int(visible(query).sum())} keys where a window of {width} shows {int(expected.sum())}",
                "bidirectional, chunked and prefix masks cannot be expressed",
            )
    return CausalMask(window)


def _probes(max_length: int, width: int) -> list[int]:
    """Positions around every place where a window or a chunk of `width` could show its edge."""
    wanted = {0, 1, 2, max_length // 3, max_length // 2, max_length - 2, max_length - 1}
    for edge in (width, 2 * width):
        wanted |= {edge - 1, edge, edge + 1}
    return sorted(position for position in wanted if 0 <= position < max_length)
