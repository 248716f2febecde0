"""`dflash_config.json`: everything that the DFlash scheduler may be told, with its defaults and ranges.

It is data: compiled into the bundle, changed by `dsc set`, and replaced between rounds by an override file
next to a running engine. `apply_override` takes an update whole or refuses it whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from dsc.bundle_schema.errors import ConfigError
from dsc.bundle_schema.strict_json import dump_canonical, parse_strict
from dsc.bundle_schema.tensors import StrictModel

DFLASH_CONFIG_NAME: Final = "dflash_config.json"
DFLASH_CONFIG_SCHEMA: Final = "1.0"
MAX_WINDOW: Final = 16

Window = Annotated[int, Field(ge=1, le=MAX_WINDOW)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Ratio = Annotated[float, Field(ge=0.0, le=1e6)]
Ms = Annotated[float, Field(ge=0.0, le=1e7)]
Rounds = Annotated[int, Field(ge=1, le=2**20)]
Positions = Annotated[int, Field(ge=1, le=2**30)]
Name = Annotated[str, Field(min_length=1, max_length=1024)]
WindowTable = Annotated[tuple[Ms, ...], Field(min_length=MAX_WINDOW, max_length=MAX_WINDOW)]

PolicyName = Literal["fixed", "rules", "calibrated", "batched"]
ProposerKind = Literal[
    "none", "cache", "ngram", "suffix", "model", "self", "prefix", "mtp", "eagle3", "dflash", "dspark"
]


class Windows(StrictModel):
    """Drafted tokens a round: where it starts and the range in which a policy may move it."""

    default: Window = 4
    min: Window = 2
    max: Window = 8

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.min <= self.default <= self.max:
            raise ValueError(f"min <= default <= max is required, got {self.min}, {self.default}, {self.max}")
        return self


class RulesPolicy(StrictModel):
    """The dynamic window controller (DWC): thresholds of its signals and the windows they lead to.

    Attributes:
        flat_slope: below this confidence slope the draft is steady and the window widens by one.
        low_entropy: below this top-3 entropy, with `kv_hit_rate` reached over the last `hit_rate_span`
            positions, the window becomes `sure_window`.
        short_plnp, long_plnp: bounds of generated tokens / prompt length; below, between and above them
            the window is `short_window`, `middle_windows` and `long_window`.
        failure_rate: above this average of the rejected share over `failure_rounds` rounds the window is
            locked at `locked_window` until `unlock_rounds` rounds in a row succeed.
    """

    flat_slope: Ratio = 0.15
    low_entropy: Ratio = 0.85
    kv_hit_rate: Share = 0.92
    hit_rate_span: Positions = 128
    sure_window: Window = 6
    short_plnp: Ratio = 0.3
    long_plnp: Ratio = 0.7
    short_window: Window = 4
    middle_windows: tuple[Window, Window] = (6, 8)
    long_window: Window = 3
    failure_rate: Share = 0.25
    failure_rounds: Rounds = 10
    locked_window: Window = 2
    unlock_rounds: Rounds = 5

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.short_plnp > self.long_plnp or self.middle_windows[0] > self.middle_windows[1]:
            raise ValueError("short_plnp <= long_plnp and middle_windows in order are required")
        return self


class CalibratedPolicy(StrictModel):
    """Maximises expected committed tokens a second from acceptance survival and measured costs.

    Attributes:
        decay: weight of the newest round in the running acceptance and cost estimates.
        prior_acceptance: acceptance of a separate draft model's positions before anything was observed; lookups and
            the target's own weights have their own.
        prior_rounds: how many observed rounds the prior is worth.
        min_gain: expected gain over plain decoding below which nothing is drafted: about the error of measured costs.
        refresh_costs: follow the costs measured at run time, from the curve of the device or an assumed one, and start
            a draft model's request with what the one before left it to lose. Decisions then depend on a clock; without
            it they are the same on every run.
    """

    decay: Share = 0.025
    prior_acceptance: Share = 0.7
    prior_rounds: Rounds = 4
    min_gain: Ratio = 0.03
    refresh_costs: bool = True


class BatchedPolicy(StrictModel):
    """The verification load balancer (VLB): admission of draft positions when sequences share a step.

    Attributes:
        fast_lane_ms: budget of the lane of first positions, which are always verified at once.
        light_load, heavy_load: device load below which two positions a sequence are admitted at a time,
            and above which the steady lane waits; between them one.
        max_rows: rows of all sequences together in one verification.
    """

    fast_lane_ms: Ms = 8.0
    light_load: Share = 0.60
    heavy_load: Share = 0.85
    max_rows: Annotated[int, Field(ge=1, le=65536)] = 256

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.light_load > self.heavy_load:
            raise ValueError("light_load <= heavy_load is required")
        return self


class PathRule(StrictModel):
    """One row of the path selector: the first row whose bounds all hold decides."""

    path: Literal["fast", "slow", "burst"]
    max_entropy_ratio: Ratio = 1e6
    min_gap: Share = 0.0
    max_attention_variance: Ratio = 1e6


class PathSelector(StrictModel):
    """Which kind of proposer serves the next round: lookup (fast), none (slow) or the draft model (burst)."""

    enabled: bool = True
    entropy_span: Positions = 32
    burst_steps: Window = 3
    rules: Annotated[tuple[PathRule, ...], Field(max_length=64)] = (
        PathRule(path="fast", max_entropy_ratio=0.6, min_gap=0.8),
        PathRule(path="burst", max_entropy_ratio=1.6),
        PathRule(path="slow"),
    )


class Proposer(StrictModel):
    """One row of the proposer table.

    Attributes:
        max_window: its own cap, within `Windows`.
        min_match, max_match: tokens of context that a lookup must, and at most may, match.
        max_context: positions beyond which it is not used.
        acceptance: share of a draft model's tokens that held when the bundle was compiled; what to expect of it at
            first. None where that was not measured.
    """

    enabled: bool = True
    max_window: Window = MAX_WINDOW
    min_match: Annotated[int, Field(ge=1, le=64)] = 1
    max_match: Annotated[int, Field(ge=1, le=64)] = 8
    max_context: Positions = 2**30
    acceptance: Share | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match <= max_match is required, got {self.min_match} > {self.max_match}")
        return self


class Fallback(StrictModel):
    """When speculation stops paying: plain decoding, a cool-down, then a probe.

    Attributes:
        max_overhead: share of plain decoding's time that speculation may cost on text it cannot predict.
        cooldown_rounds: plain rounds before the first probe; doubled after each that fails.
        max_cooldown_rounds: where the doubling ends.
        probe_interval: changes nothing: a proposer that rests is tried again when its cool-down has ended.
        probe_rounds: rounds of speculation that make a probe.
    """

    enabled: bool = True
    max_overhead: Share = 0.03
    cooldown_rounds: Rounds = 4
    max_cooldown_rounds: Rounds = 64
    probe_interval: Rounds = 64
    probe_rounds: Rounds = 2

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.cooldown_rounds > self.max_cooldown_rounds:
            raise ValueError("cooldown_rounds <= max_cooldown_rounds is required")
        return self


class CacheHealth(StrictModel):
    """The cache health evaluator (CHE): how often it looks, how long a repair may take, what is healthy."""

    scan_ms: Ms = 200.0
    repair_ms: Ms = 20.0
    min_density: Share = 0.75
    max_fragmentation: Share = 0.12
    max_layer_spread: Ratio = 0.08


class ContinuationCache(StrictModel):
    """Continuations of earlier texts by fingerprint, verified against the tokens themselves, and KV rows of prefixes.

    Attributes:
        semantic_cut: cosine between the directions of the final hidden state before and after a token below which a new
            fingerprint space starts there; -1 never does.
        reuse_prefixes: do not read again what the live cache or a saved text holds of a prompt. A request may say so
            itself.
        prefix_max_nbytes: of the saved KV rows; 0 saves none.
    """

    enabled: bool = True
    entries: Annotated[int, Field(ge=1, le=2**24)] = 1536
    max_nbytes: Annotated[int, Field(ge=0, le=2**50)] = 2**28
    fingerprint_bits: Annotated[int, Field(ge=1, le=64)] = 64
    semantic_cut: Annotated[float, Field(ge=-1.0, le=1.0)] = 0.2
    reuse_prefixes: bool = False
    prefix_max_nbytes: Annotated[int, Field(ge=0, le=2**50)] = 2**28


class CostCurve(StrictModel):
    """What things cost on one device with so much in the cache; used when the device at hand has this fingerprint.

    Attributes:
        context: KV rows that were valid when the costs were measured; a device has a curve for each of several.
        verify_ms: entry r - 1 is the target's forward over r rows, r = 1..16.
        draft_ms: proposer -> table whose entry w - 1 is the cost of proposing w tokens.
        read_ms: proposer -> what reading a long text costs its model for each token, as before its first draft.
        host_ms: everything else in a round.
    """

    device: Name
    context: Positions = 64
    verify_ms: WindowTable
    draft_ms: dict[ProposerKind, WindowTable] = Field(default_factory=dict)
    read_ms: dict[ProposerKind, Ms] = Field(default_factory=dict)
    host_ms: Ms = 0.0


class ResourceProfile(StrictModel):
    """Start-up settings for devices with at least so much (RAS); of those that fit, the one with most memory is used.

    Attributes:
        min_memory_gib: of the device, or of the machine for the CPU.
        window: drafts a round to start with.
        draft: load the bundle's draft model; without it lookups draft.
        kernels: a note for people; what runs is what the bundle holds for the device.
    """

    name: Name
    provider: Literal["cpu", "cuda"] = "cuda"
    min_memory_gib: Ratio
    min_cores: Annotated[int, Field(ge=0, le=2**16)] = 0
    window: Window
    draft: bool = True
    kernels: tuple[Name, ...] = ()


class MemoryPressure(StrictModel):
    """Above `threshold` of the memory for `seconds`: the draft model rests, `window` caps, nothing is saved."""

    threshold: Share = 0.85
    seconds: Ratio = 300.0
    window: Window = 6


class TenantCap(StrictModel):
    """Limits of one tenant; `weight` is its share of the queue relative to others."""

    max_window: Window = MAX_WINDOW
    max_tokens: Positions = 2**30
    weight: Annotated[float, Field(ge=0.001, le=1000.0)] = 1.0


class Tenants(StrictModel):
    """Caps by tenant id, and the cap of every tenant that is not named."""

    default: TenantCap = TenantCap()
    caps: dict[Name, TenantCap] = Field(default_factory=dict)


_PROFILES = (
    ResourceProfile(name="24 GB", min_memory_gib=20.0, window=4, kernels=("head_tiled",)),
    ResourceProfile(name="40 GB", min_memory_gib=36.0, window=6, kernels=("head_tiled", "in_place")),
    ResourceProfile(name="80 GB", min_memory_gib=72.0, window=8, kernels=("all",)),
)


class DflashConfig(StrictModel):
    """The scheduler's configuration.

    Attributes:
        proposers: the table of proposers. The bundle's draft and prompt lookup need no row to be used, the continuation
            cache does, and so does prompt lookup in a bundle that was made without a draft.
        costs: measured cost curves, for each device one or more.
        temperatures: proposer -> calibration temperature of each draft position (one for all that follow).
        lossy: allow policies that change the output's distribution; there is none.
        secure_rollback: zero rejected KV rows instead of only forgetting them.
        adaptive_rollback: after a rejection a draft model keeps what it has read of the drafts that held.
    """

    schema_version: Annotated[str, Field(pattern=r"^\d+\.\d+$")] = DFLASH_CONFIG_SCHEMA
    policy: PolicyName = "fixed"
    windows: Windows = Windows()
    rules: RulesPolicy = RulesPolicy()
    calibrated: CalibratedPolicy = CalibratedPolicy()
    batched: BatchedPolicy = BatchedPolicy()
    selector: PathSelector = PathSelector()
    proposers: dict[ProposerKind, Proposer] = Field(default_factory=dict)
    fallback: Fallback = Fallback()
    health: CacheHealth = CacheHealth()
    cache: ContinuationCache = ContinuationCache()
    costs: Annotated[tuple[CostCurve, ...], Field(max_length=64)] = ()
    temperatures: dict[
        ProposerKind,
        Annotated[
            tuple[Annotated[float, Field(ge=0.01, le=100.0)], ...],
            Field(min_length=1, max_length=MAX_WINDOW),
        ],
    ] = Field(default_factory=dict)
    profiles: Annotated[tuple[ResourceProfile, ...], Field(max_length=64)] = _PROFILES
    pressure: MemoryPressure = MemoryPressure()
    tenants: Tenants = Tenants()
    lossy: bool = False
    secure_rollback: bool = False
    adaptive_rollback: bool = True

    def cost_curves(self, device: str) -> tuple[CostCurve, ...]:
        """The curves measured on the device with this fingerprint, the shortest context first."""
        return tuple(sorted((curve for curve in self.costs if curve.device == device), key=lambda curve: curve.context))


def parse_config(data: bytes, where: str = DFLASH_CONFIG_NAME) -> DflashConfig:
    """Read a configuration.

    Raises:
        ConfigError: a field is missing, unknown, of the wrong type or out of range.
        BundleError: the JSON itself is malformed.
    """
    return parse_strict(DflashConfig, data, where, DFLASH_CONFIG_SCHEMA, ConfigError)


def dump_config(config: DflashConfig) -> bytes:
    """The canonical bytes of a configuration."""
    return dump_canonical(config)


def apply_override(config: DflashConfig, changes: Mapping[str, Any]) -> DflashConfig:
    """A configuration with some fields replaced; all of them, or an error and none.

    Args:
        config: stays as it is.
        changes: dotted path -> JSON value, e.g. ``{"windows.max": 12, "proposers.ngram.enabled": True}``.
            Elements of a list are addressed by number; a missing row of a table is made from its defaults.

    Raises:
        ConfigError: names the field and says why it is refused.
    """
    tree = config.model_dump(mode="json")
    for path, value in changes.items():
        if path == "schema_version":
            raise ConfigError(path, "cannot be changed")
        _set(tree, path, value)
    try:
        data = json.dumps(tree, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(", ".join(changes), f"JSON values are required: {error}") from None
    return parse_config(data, "override")


def _set(tree: dict[str, Any], path: str, value: Any) -> None:
    node: Any = tree
    *parents, last = path.split(".")
    for part in parents:
        node = node.setdefault(part, {}) if isinstance(node, dict) else _element(node, part, path)
    if isinstance(node, dict):
        node[last] = value
    else:
        _element(node, last, path)
        node[int(last)] = value


def _element(node: Any, part: str, path: str) -> Any:
    if not isinstance(node, list):
        raise ConfigError(path, f"{part!r} is not a field", "the field before it has no parts")
    if not (part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(node)):
        raise ConfigError(path, f"an element from 0 to {len(node) - 1} is required, got {part[:40]!r}")
    return node[int(part)]
