"""Every rotary scaling type, on both sides of where its frequencies change, against the framework with its cache."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from reference_forward import ReferenceForward
from tiny_models import tiny_model
from transformers import DynamicCache

from dsc.compiler.export_hf import export_model

SWITCH = 16
BASE = {"rope_theta": 1e4, "factor": 4.0}
SCALINGS = {
    "linear": BASE,
    "dynamic": BASE,
    "llama3": BASE | {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": SWITCH},
    "yarn": BASE | {"original_max_position_embeddings": SWITCH},
    "longrope": BASE
    | {
        "original_max_position_embeddings": SWITCH,
        "short_factor": [1 + i / 10 for i in range(8)],
        "long_factor": [2 + i / 2 for i in range(8)],
    },
}
ONE_CALL = [(0, length) for length in range(14, 21)]
STEPS = [(0, 14, 15, 16, 17, 18, 20), (0, 20, 21, 24), (0, 10, 30, 31, 40)]


def _overrides(kind):
    length = SWITCH if kind == "dynamic" else SWITCH * 4
    return {"rope_parameters": SCALINGS[kind] | {"rope_type": kind}, "max_position_embeddings": length}


@cache
def _exported(kind):
    return export_model(tiny_model("llama", **_overrides(kind)))


def _framework(kind, ids, cuts):
    """The framework's logits with its cache, the tokens given in the same calls."""
    model, past, found = tiny_model("llama", **_overrides(kind)), DynamicCache(), []
    with torch.no_grad():
        for start, end in pairwise(cuts):
            positions = torch.arange(start, end)[None]
            found.append(
                model(torch.from_numpy(ids[:, start:end]), cache=past, use_cache=True, position_ids=positions).logits
            )
    return torch.cat(found, 1).numpy()


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("cuts", ONE_CALL + STEPS)
def test_logits_equal_the_frameworks_with_its_cache(kind, cuts):
    ids = np.random.default_rng(5).integers(3, 320, (1, 40))
    expected = _framework(kind, ids, cuts)
    run = ReferenceForward(_exported(kind))
    got = np.concatenate([run(ids[:, a:b]) for a, b in pairwise(cuts)], axis=1)
    assert np.abs(got - expected).max() <= 1e-4 * np.ptp(expected)
    assert (got.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_long_neighbour_does_not_change_a_short_sequence(kind):
    ids = np.random.default_rng(6).integers(3, 320, (2, 24))
    both, alone = ReferenceForward(_exported(kind), 2), ReferenceForward(_exported(kind))
    both.past = np.array([0, 20], np.int32)
    np.testing.assert_allclose(both(ids[:, :4])[:1], alone(ids[:1, :4]), atol=1e-5)


def test_facts_name_the_scaling():
    assert _exported("longrope").info.rope.kind == "longrope"
    assert _exported("longrope").info.rope.scaling["original_max_position_embeddings"] == SWITCH
    assert _exported("dynamic").info.max_length == _exported("longrope").info.max_length == SWITCH
    assert _exported("yarn").info.max_length == 4 * SWITCH
