"""What a configuration asks for and this runtime does not do, so that nothing is accepted in silence."""

from __future__ import annotations

from dsc.bundle_schema.dflash_config import DflashConfig, Fallback, PathRule, ProposerKind

_UNBOUNDED = PathRule(path="fast").max_attention_variance

# Fields that are read when a bundle is loaded: a later change holds from the next load on.
_AT_LOAD = ("secure_rollback", "profiles", "cache.fingerprint_bits")
# Fields that some policies read and others do not.
_OF_POLICIES: dict[str, tuple[str, ...]] = {
    "windows.default": ("fixed",),
    "windows.min": ("fixed", "rules"),  # a resource profile sets the fixed window within the range
    "rules": ("rules",),
    "selector": ("rules",),
    "batched": ("batched",),
    "calibrated.min_gain": ("calibrated",),
    "calibrated.refresh_costs": ("calibrated", "batched"),
}
_LOOKUPS = {"ngram", "cache"}  # every bundle has them


def unused_fields(config: DflashConfig, draft: ProposerKind | None = None) -> list[str]:
    """Fields that differ from their defaults and change nothing, each with the reason.

    Args:
        draft: the kind of draft that the bundle has; None when that is not known.
    """
    found = []
    if draft is not None:
        absent = [kind for kind in config.proposers if kind not in (*_LOOKUPS, draft)]
        found += [f"proposers.{kind}: the bundle has no draft of this kind" for kind in absent]
    if config.fallback.probe_interval != Fallback().probe_interval:
        found.append("fallback.probe_interval: a proposer that rests is tried again when its cool-down has ended")
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


def unread_fields(before: DflashConfig, config: DflashConfig) -> list[str]:
    """Fields that differ from what they were and that the policy in force does not read."""
    return [
        f"{path}: the policy is {config.policy!r}, not {' or '.join(policies)}"
        for path, policies in _OF_POLICIES.items()
        if config.policy not in policies and _value(before, path) != _value(config, path)
    ]


def held_back_fields(loaded: DflashConfig, config: DflashConfig) -> list[str]:
    """Fields that differ from what was loaded and are only read at load."""
    return [f"{path}: holds from the next load on" for path in _AT_LOAD if _value(loaded, path) != _value(config, path)]


def _value(config: DflashConfig, path: str) -> object:
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
