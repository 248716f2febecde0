"""Sequences that accept different counts in one round: each row's tokens are its own, and its own distribution's."""

from __future__ import annotations

import numpy as np
import pytest
from forward_graphs import VOCAB
from packed_bundle import packed_bundle
from toy_bundle import toy_bundle
from verdict_law import plain_distribution

from dsc.bundle_schema.dflash_config import DflashConfig, Proposer
from dsc.compiler.chi_square import chi_square
from dsc.kernels.native import find_library
from dsc.runtime import load

COLD = {"temperature": 0.3}
DRAFTS = {"proposer": "model", "window": 4, "fallback": False}
LOOKUPS = {"proposer": "ngram", "window": 3, "fallback": False}
IMPLAUSIBLE = 1e-4


def test_three_rows_that_accept_all_some_and_nothing(tmp_path):
    """Three closed cycles of tokens; the draft knows the first, half of the second and nothing of the third."""
    following = np.concatenate([np.roll(np.arange(start, start + 10), -1) for start in (0, 10, 20)])
    target = np.eye(30, dtype=np.float32)[following]
    guesses = following.copy()
    guesses[10:20:2] = 0
    guesses[20:] = 0
    draft = np.eye(30, dtype=np.float32)[guesses]
    config = DflashConfig(proposers={"model": Proposer(), "ngram": Proposer(enabled=False)})
    path = toy_bundle(tmp_path / "toy.dsmodel", target, draft, max_length=120, history=False, config=config)
    model = load(path)
    with model.engine(slots=3) as engine:
        tickets = [engine.submit([start, start + 1], max_new_tokens=60, speculation=DRAFTS) for start in (0, 10, 20)]
        results = [ticket.result() for ticket in tickets]
        assert engine.stats()["most_sequences"] == 3
    for start, result in zip((0, 10, 20), results, strict=True):
        assert list(result.ids) == [start + (2 + i) % 10 for i in range(60)]
    first, second, third = (ticket.stats.acceptance_rate for ticket in tickets)
    assert (first, third) == (1, 0)
    assert 0.2 < second < 0.8


def test_four_cold_rows_have_the_distribution_of_their_states(tmp_path):
    """Counts of every row after every state, over long generations with a draft of each row's own."""
    vocab = 9
    rng = np.random.default_rng(11)
    target = rng.normal(scale=0.6, size=(vocab, vocab)).astype(np.float32)
    draft = target + rng.normal(scale=0.2, size=target.shape).astype(np.float32)
    model = load(toy_bundle(tmp_path / "toy.dsmodel", target, draft, max_length=4096), verify="never")
    expected = [plain_distribution(row, **COLD) for row in target]
    with model.engine(slots=4) as engine:
        options = {"max_new_tokens": 3000, "sampling": COLD, "speculation": DRAFTS}
        tickets = [engine.submit([row], seed=row, **options) for row in range(4)]
        results = [ticket.result(120) for ticket in tickets]
    assert len({ticket.stats.accepted for ticket in tickets}) == 4
    for row, result in enumerate(results):
        tokens = np.array([row, *result.ids])
        weighted = tokens * (np.arange(len(tokens)) % 7 + 1)
        states = (tokens[1:-1] + np.cumsum(weighted)[:-2]) % vocab
        for state in range(vocab):
            counts = np.bincount(tokens[2:][states == state], minlength=vocab).astype(float)
            assert counts.sum() > 50
            assert chi_square(counts, expected[state])[2] > IMPLAUSIBLE, (row, state)


def test_four_rows_of_one_packed_forward_have_their_prompts_distribution(tmp_path):
    """First two tokens behind four prompts of different lengths, each against the logits of a run of its own."""
    library = find_library()
    if library.path is None:
        pytest.skip(library.reason)
    model = load(packed_bundle(tmp_path / "tiny.dsmodel"), kernels="native")
    prompts = [[5, 6, 7, 8] * 6, [1, 2, 3, 1, 2, 3, 1, 2], [9] * 40, [4, 30, 4, 30, 4]]
    n = 200
    options = {"max_new_tokens": 2, "sampling": {"temperature": 4.0}, "speculation": LOOKUPS}
    with model.engine(slots=4, max_waiting=4 * n) as engine:
        rows = [[engine.submit(prompt, seed=seed, **options) for prompt in prompts] for seed in range(n)]
        drawn = np.array([[ticket.result().ids for ticket in row] for row in rows])
        assert engine.stats()["most_sequences"] == 4
        assert engine.stats()["forwards"] == engine.stats()["rounds"]
    for i, prompt in enumerate(prompts):
        first = _law(model, prompt, 4.0)
        counts = np.bincount(drawn[:, i, 0], minlength=VOCAB).astype(float)
        assert chi_square(counts, first)[2] > IMPLAUSIBLE, prompt
        second = sum(_law(model, [*prompt, int(token)], 4.0) for token in drawn[:, i, 0]) / n
        counts = np.bincount(drawn[:, i, 1], minlength=VOCAB).astype(float)
        assert chi_square(counts, second)[2] > IMPLAUSIBLE, prompt


def _law(model, prompt, temperature):
    """The next token's distribution, from the logits of a plain run."""
    seen = []
    model.generate(prompt, 1, speculation="off", processors=[lambda logits, *_: seen.append(logits[0].copy())])
    return plain_distribution(seen[0], temperature=temperature)
