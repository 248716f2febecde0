"""What a configuration asks for and this runtime does not do, so that nothing is accepted in silence."""

from __future__ import annotations

from dsc.bundle_schema.dflash_config import DflashConfig, PathRule

_UNBOUNDED = PathRule(path="fast").max_attention_variance

# Fields that are read when a bundle is loaded: a later change holds from the next load on.
_AT_LOAD = ("secure_rollback", "profiles", "cache.fingerprint_bits")


def unused_fields(config: DflashConfig) -> list[str]:
    """Fields that differ from their defaults and change nothing, each with the reason."""
    found = []
    if config.temperatures:
        found.append("temperatures: no policy uses the confidence that a proposer reports")
    if any(rule.max_attention_variance < _UNBOUNDED for rule in config.selector.rules):
        found.append("selector.rules.max_attention_variance: no graph reports attention, the bound is taken to hold")
    given = DflashConfig().profiles
    if any(row.kernels and row not in given for row in config.profiles):
        found.append("profiles.kernels: a note for people, what runs is what the bundle holds for the device")
    if config.lossy:
        found.append("lossy: there is no policy that changes the output")
    return found


def held_back_fields(loaded: DflashConfig, config: DflashConfig) -> list[str]:
    """Fields that differ from what was loaded and are only read at load."""
    return [f"{path}: holds from the next load on" for path in _AT_LOAD if _value(loaded, path) != _value(config, path)]


def _value(config: DflashConfig, path: str) -> object:
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
