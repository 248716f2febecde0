"""The DFlash configuration: defaults of the specification, ranges, and updates that are whole or refused."""

import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsc.bundle_schema.bundle_errors import UnsupportedSchema
from dsc.bundle_schema.dflash_config import (
    CostCurve,
    DflashConfig,
    Proposer,
    TenantCap,
    Tenants,
    apply_override,
    dump_config,
    parse_config,
)
from dsc.bundle_schema.errors import ConfigError

TABLE = tuple(float(rows) for rows in range(1, 17))
CONFIG = DflashConfig(
    proposers={"ngram": Proposer(min_match=3), "model": Proposer(max_window=8)},
    costs=(CostCurve(device="cpu", verify_ms=TABLE, draft_ms={"model": TABLE}, host_ms=0.1),),
    temperatures={"model": (1.0, 1.25)},
    tenants=Tenants(caps={"acme": TenantCap(max_window=2)}),
)


def test_round_trip_is_canonical():
    data = dump_config(CONFIG)
    assert parse_config(data) == CONFIG
    assert dump_config(parse_config(data)) == data


def test_defaults_are_the_specified_ones():
    config = DflashConfig()
    assert (config.windows.default, config.windows.min, config.windows.max) == (4, 2, 8)
    rules = config.rules
    assert (rules.flat_slope, rules.low_entropy, rules.kv_hit_rate, rules.hit_rate_span) == (0.15, 0.85, 0.92, 128)
    assert (rules.short_plnp, rules.long_plnp, rules.sure_window) == (0.3, 0.7, 6)
    assert (rules.short_window, rules.middle_windows, rules.long_window) == (4, (6, 8), 3)
    assert (rules.failure_rate, rules.failure_rounds, rules.locked_window, rules.unlock_rounds) == (0.25, 10, 2, 5)
    health = config.health
    assert (health.scan_ms, health.repair_ms) == (200, 20)
    assert (health.min_density, health.max_fragmentation, health.max_layer_spread) == (0.75, 0.12, 0.08)
    assert (config.batched.fast_lane_ms, config.batched.light_load, config.batched.heavy_load) == (8, 0.60, 0.85)
    assert (config.selector.burst_steps, config.selector.entropy_span) == (3, 32)
    assert (config.cache.entries, config.cache.fingerprint_bits) == (1536, 64)
    assert [profile.window for profile in config.profiles] == [4, 6, 8]
    assert (config.pressure.threshold, config.pressure.seconds, config.pressure.window) == (0.85, 300, 6)
    assert config.fallback.max_overhead == 0.03
    assert not config.lossy


def test_the_cost_curves_of_a_device():
    longer = CONFIG.costs[0].model_copy(update={"context": 512})
    config = CONFIG.model_copy(update={"costs": (longer, *CONFIG.costs)})
    assert [curve.context for curve in config.cost_curves("cpu")] == [64, 512]
    assert config.cost_curves("another") == ()


@pytest.mark.parametrize(
    ("path", "value", "read"),
    [
        ("windows.max", 16, lambda config: config.windows.max),
        ("policy", "calibrated", lambda config: config.policy),
        ("proposers.ngram.enabled", False, lambda config: config.proposers["ngram"].enabled),
        ("proposers.suffix.max_match", 32, lambda config: config.proposers["suffix"].max_match),
        ("selector.rules.0.path", "slow", lambda config: config.selector.rules[0].path),
        ("costs.0.verify_ms.15", 99.5, lambda config: config.costs[0].verify_ms[15]),
        ("tenants.caps.acme.max_window", 1, lambda config: config.tenants.caps["acme"].max_window),
        ("fallback.max_overhead", 0, lambda config: config.fallback.max_overhead),
    ],
)
def test_an_override_changes_one_field(path: str, value: Any, read: Any):
    before = dump_config(CONFIG)
    after = apply_override(CONFIG, {path: value})
    assert read(after) == value
    assert after != CONFIG
    assert dump_config(CONFIG) == before
    assert apply_override(after, {path: read(CONFIG)} if "suffix" not in path else {}) in (CONFIG, after)


def test_fields_that_only_fit_together_are_changed_together():
    with pytest.raises(ConfigError, match="min <= default <= max is required"):
        apply_override(CONFIG, {"windows.default": 1})
    changed = apply_override(CONFIG, {"windows.default": 1, "windows.min": 1})
    assert changed.windows.default == 1


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("windows.max", 17, "windows.max: Input should be less than or equal to 16"),
        ("windows.max", 0, "windows.max: Input should be greater than or equal to 1"),
        ("windows.max", -1, "windows.max"),
        ("windows.max", 10**30, "windows.max"),
        ("windows.max", "8", "windows.max: Input should be a valid integer"),
        ("windows.max", 8.0, "windows.max: Input should be a valid integer"),
        ("windows.max", True, "windows.max: Input should be a valid integer"),
        ("windows.max", None, "windows.max"),
        ("windows.max", float("nan"), "windows.max: JSON values are required"),
        ("rules.low_entropy", float("inf"), "rules.low_entropy: JSON values are required"),
        ("rules.low_entropy", 1e300, "rules.low_entropy"),
        ("windows.maximum", 8, "windows.maximum: no such field"),
        ("window.max", 8, "window: no such field"),
        ("windows.max.deep", 8, "windows.max.deep: 'max' is not a field|windows.max.deep"),
        ("proposers.magic.enabled", True, "proposers.magic"),
        ("proposers.ngram.min_match", 60, "proposers.ngram: min_match <= max_match"),
        ("selector.rules.7.path", "slow", "selector.rules.7.path: an element from 0 to 2 is required"),
        ("selector.rules.-1.path", "slow", "selector.rules.-1.path: an element from 0 to 2 is required"),
        ("costs.0.verify_ms", [1.0], "costs.0.verify_ms"),
        ("temperatures.model", [], "temperatures.model"),
        ("policy", "magic", "policy: Input should be 'fixed', 'rules', 'calibrated' or 'batched'"),
        ("schema_version", "1.0", "schema_version: cannot be changed"),
        ("", 1, "no such field"),
        ("windows", object(), "windows: JSON values are required"),
    ],
)
def test_a_bad_override_is_refused_whole_with_field_and_reason(path: str, value: Any, reason: str):
    before = dump_config(CONFIG)
    with pytest.raises(ConfigError) as caught:
        apply_override(CONFIG, {"policy": "rules", path: value})
    assert any(part in str(caught.value) for part in reason.split("|")), caught.value
    assert dump_config(CONFIG) == before


@given(st.dictionaries(st.text(".abcdefwindows0123", max_size=20), st.none() | st.integers() | st.text(), max_size=3))
def test_any_override_is_taken_or_refused(changes: dict[str, Any]):
    with suppress(ConfigError):
        assert isinstance(apply_override(CONFIG, changes), DflashConfig)


def test_files_are_checked_like_overrides():
    data = dump_config(CONFIG)
    with pytest.raises(ConfigError, match=re.escape("dflash_config.json: windows.max: ")):
        parse_config(data.replace(b'"max": 8', b'"max": 99'))
    with pytest.raises(UnsupportedSchema):
        parse_config(data.replace(b'"schema_version": "1.0"', b'"schema_version": "2.0"'))
