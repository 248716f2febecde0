"""What repairs of the pool and processors must not change: the tokens of the sequences of an engine."""

from itertools import pairwise

import numpy as np
import pytest
from forward_graphs import VOCAB
from packed_bundle import packed_bundle

from dsc.kernels.native import find_library
from dsc.runtime import load

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(0, VOCAB, size).tolist() for size in (1, 3, 9, 40, 90, 17)] + [[5, 6, 7, 8] * 6]


@pytest.fixture
def model(tmp_path):
    if find_library().path is None:
        pytest.skip(find_library().reason)
    return load(packed_bundle(tmp_path / "tiny.dsmodel"), kernels="native")


def test_repairs_in_every_round_change_no_token(model):
    model.update_config({"health.scan_ms": 0.0, "health.min_density": 1.0, "health.max_fragmentation": 0.0})
    lengths = [2, 40, 6, 60, 3, 50, 30, 45]
    asked = [(PROMPTS[i % len(PROMPTS)], n) for i, n in enumerate(lengths)]
    wanted = [model.generate(prompt, n).ids for prompt, n in asked]
    engine = model.engine(slots=4, background=False)
    tickets = [engine.submit(prompt, max_new_tokens=n) for prompt, n in asked]
    engine.run()
    assert [ticket.result().ids for ticket in tickets] == wanted
    cache = engine.stats()["cache"]
    assert cache["scans"] > 10
    assert cache["moved"] > 0


def alternate(logits, history, drafts):
    """A grammar: odd tokens follow even ones, and even ones odd ones."""
    tokens = [*history, *drafts]
    for i, row in enumerate(logits):
        row[(np.arange(len(row)) + tokens[len(history) + i - 1]) % 2 == 0] = -np.inf


@pytest.mark.parametrize("sampling", [{}, {"sampling": {"temperature": 1.2}, "seed": 3}], ids=["greedy", "sampled"])
def test_a_grammar_holds_inside_the_blocks_of_every_sequence(model, sampling):
    options = {"max_new_tokens": 40, "processors": [alternate], **sampling}
    wanted = [model.generate(prompt, speculation="off", **options).ids for prompt in PROMPTS]
    drafted = {"speculation": {"proposer": "ngram", "window": 4, "fallback": False}}
    with model.engine(slots=3) as engine:
        tickets = [engine.submit(prompt, **options, **drafted) for prompt in PROMPTS]
    assert [ticket.result().ids for ticket in tickets] == wanted
    assert sum(ticket.stats.accepted for ticket in tickets) > 0
    for prompt, ids in zip(PROMPTS, wanted, strict=True):
        assert all((before + token) % 2 for before, token in pairwise([prompt[-1], *ids]))
