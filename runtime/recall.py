"""What a request need not read: the part of its prompt that a cache or a saved text holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsc.bundle_schema.dflash_config import DflashConfig
from dsc.runtime.prefix_cache import PrefixCache, Zones
from dsc.runtime.request import Request
from dsc.runtime.stats import GenerationStats


def reuses(request: Request, config: DflashConfig) -> bool:
    """Whether the request starts from what is known; the configuration decides when it does not say."""
    return config.cache.reuse_prefixes if request.reuse_cache is None else request.reuse_cache


def recall(
    prefixes: PrefixCache,
    config: DflashConfig,
    request: Request,
    stats: GenerationStats,
    live: Sequence[int],
    zones: Zones,
    rewind: Callable[[int], None],
) -> None:
    """Leave in the zones what they, or a saved text, hold of the prompt.

    Args:
        live: the text that the zones have read, or more.
        rewind: leaves the first tokens of `live` in the zones, as many as it is told.
    """
    if not reuses(request, config):
        rewind(0)
        return
    stats.prefix_reason = next((zone.unsavable for zone in zones.values() if zone.unsavable), "")
    prefixes.configure(0 if stats.prefix_reason else config.cache.prefix_max_nbytes)
    lost = prefixes.counts.lost
    stats.restored_tokens = prefixes.swap_in(live, request.ids, zones, rewind)
    if prefixes.counts.lost > lost:
        stats.prefix_reason = "the ring of a sliding window has written over what the prompt needs of a known text"
