import numpy as np
import pytest
from toy_bundle import toy_bundle

from dsc.bundle_schema.dflash_config import DflashConfig, Proposer, apply_override
from dsc.runtime import load
from dsc.runtime.config_notes import held_back_fields, unused_fields

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
    ],
)
def test_what_changes_nothing_is_named_with_the_reason(changes, field):
    (note,) = unused_fields(apply_override(DflashConfig(), changes))
    assert note.startswith(f"{field}: ")
    assert len(note) > len(field) + 10


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
