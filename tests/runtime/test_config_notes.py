import numpy as np
import pytest
from toy_bundle import toy_bundle

from dsc.bundle_schema.dflash_config import DflashConfig, Proposer, apply_override
from dsc.runtime import load
from dsc.runtime.config_notes import held_back_fields, unread_fields, unused_fields

TABLE = np.random.default_rng(11).normal(size=(13, 13)).astype(np.float32)


def test_the_defaults_ask_for_nothing_that_is_not_done():
    assert unused_fields(DflashConfig()) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"temperatures.model": [1.1, 1.3]}, "temperatures"),
        ({"selector.rules.1.max_attention_variance": 0.5}, "selector.rules.max_attention_variance"),
        ({"profiles": [{"name": "mine", "min_memory_gib": 1, "window": 4, "kernels": ["all"]}]}, "profiles.kernels"),
        ({"lossy": True}, "lossy"),
        ({"fallback.probe_interval": 9}, "fallback.probe_interval"),
    ],
)
def test_what_changes_nothing_is_named_with_the_reason(changes, field):
    (note,) = unused_fields(apply_override(DflashConfig(), changes))
    assert note.startswith(f"{field}: ")
    assert len(note) > len(field) + 10


def test_a_proposer_that_the_bundle_has_not_is_named():
    config = DflashConfig(proposers={kind: Proposer() for kind in ("ngram", "cache", "self", "eagle3")})
    (note,) = unused_fields(config, "self")
    assert note.startswith("proposers.eagle3: ")
    assert len(unused_fields(config, "ngram")) == 2


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        ("calibrated", {"windows.min": 1, "windows.default": 2}),
        ("calibrated", {"rules.short_window": 3}),
        ("calibrated", {"selector.burst_steps": 2}),
        ("rules", {"batched.max_rows": 8}),
        ("fixed", {"calibrated.refresh_costs": False}),
        ("batched", {"calibrated.min_gain": 0.1}),
    ],
)
def test_what_the_policy_does_not_read_is_named(policy, changes):
    before = apply_override(DflashConfig(), {"policy": policy})
    found = unread_fields(before, apply_override(before, changes))
    assert len(found) == len(changes)
    assert all(f"the policy is {policy!r}" in note for note in found)
    assert unread_fields(before, apply_override(before, {"windows.max": 9})) == []


def test_matches_and_acceptance_hold_from_the_next_request_on(tmp_path):
    config = DflashConfig(proposers={"ngram": Proposer(min_match=3), "self": Proposer(acceptance=0.9)})
    model = load(toy_bundle(tmp_path / "toy.dsmodel", TABLE, TABLE, draft_kind="self", config=config), verify="never")
    every = list(range(13))  # what follows any token is there once, what follows three tokens is not

    def lookup():
        return model.generate(every, 4, speculation={"proposer": "ngram", "window": 2, "fallback": False}).stats

    before = lookup()
    model.update_config({"proposers.ngram.min_match": 1, "proposers.self.acceptance": 0.5})
    after = lookup()
    model.generate(every, 2)
    assert model.scheduler._proposers["self"].expected == (0.5, 0.5)
    assert before.proposed == 0 < after.proposed
    assert before.config_notes == after.config_notes == []


@pytest.mark.parametrize("changes", [{"secure_rollback": True}, {"cache.fingerprint_bits": 8}, {"profiles": []}])
def test_what_is_read_at_load_only_is_named(changes):
    (path,) = changes
    changed = apply_override(DflashConfig(), changes)
    assert held_back_fields(DflashConfig(), changed) == [f"{path}: holds from the next load on"]
    assert held_back_fields(changed, changed) == []


def test_the_statistics_tell(tmp_path):
    config = DflashConfig(proposers={"ngram": Proposer()}, lossy=True)
    model = load(toy_bundle(tmp_path / "toy.dsmodel", TABLE, config=config), verify="never")
    assert [note.split(":")[0] for note in model.generate([1, 2], 3).stats.config_notes] == ["lossy"]
    model.update_config({"lossy": False, "secure_rollback": True})
    notes = model.generate([1, 2], 3, speculation="off").stats.config_notes
    assert notes == ["secure_rollback: holds from the next load on"]
