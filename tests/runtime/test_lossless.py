"""Whatever is drafted, the output is the target's own: greedy token for token, sampled seed for seed."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_lm import greedy_reference
from toy_bundle import toy_bundle

from dsc.runtime import load

VOCAB = 11
PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
QUICK = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])


def tables(seed: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """A random target and a draft that agrees with it more or less often."""
    rng = np.random.default_rng(seed)
    target = rng.normal(size=(VOCAB, VOCAB)).astype(np.float32)
    return target, target + noise * rng.normal(size=target.shape).astype(np.float32)


def forced(proposer: str, window: int) -> dict[str, object]:
    return {"proposer": proposer, "window": window, "fallback": False}


@QUICK
@given(seed=st.integers(0, 2**16), noise=st.sampled_from([0.0, 0.3, 3.0]), prompt=PROMPTS, history=st.booleans())
def test_greedy_output_is_the_rule_s_own(seed, noise, prompt, history):
    target, draft = tables(seed, noise)
    expected = greedy_reference(target, prompt, 40, history=history)
    with TemporaryDirectory() as folder:
        model = load(toy_bundle(Path(folder) / "toy.dsmodel", target, draft, history=history), verify="never")
        assert list(model.generate(prompt, 40, speculation="off").ids) == expected
        proposed = 0
        for proposer in ("ngram", "model"):
            for window in range(1, 9):
                result = model.generate(prompt, 40, speculation=forced(proposer, window))
                assert list(result.ids) == expected, (proposer, window)
                proposed += result.stats.proposed
        assert list(model.generate(prompt, 40).ids) == expected
        assert proposed > 0
        model.bundle.arena.check_guards()


@QUICK
@given(seed=st.integers(0, 2**16), prompt=PROMPTS, temperature=st.sampled_from([0.5, 1.3]))
def test_sampled_output_depends_on_the_seed_alone(seed, prompt, temperature):
    target, draft = tables(seed, 0.3)
    sampling = {"temperature": temperature, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
    with TemporaryDirectory() as folder:
        model = load(toy_bundle(Path(folder) / "toy.dsmodel", target, draft), verify="never")
        plain = model.generate(prompt, 30, sampling, seed=seed, speculation="off")
        for proposer in ("ngram", "model"):
            for window in (1, 3, 8):
                result = model.generate(prompt, 30, sampling, seed=seed, speculation=forced(proposer, window))
                assert result.ids == plain.ids, (proposer, window)


def test_a_draft_that_is_the_target_is_always_right(tmp_path):
    target, _ = tables(0, 0)
    model = load(toy_bundle(tmp_path / "toy.dsmodel", target, target), verify="never")
    for window in range(1, 9):
        stats = model.generate([1, 2], 45, speculation=forced("model", window)).stats
        assert stats.accepted == stats.evaluated == stats.proposed > 0
        assert stats.tokens_per_round == pytest.approx(45 / (1 + -(-44 // (window + 1))))


def test_a_draft_that_is_always_wrong_is_never_accepted(tmp_path):
    target, _ = tables(0, 0)
    model = load(toy_bundle(tmp_path / "toy.dsmodel", target, -target), verify="never")
    expected = greedy_reference(target, [1, 2], 45)
    for window in (1, 4):
        result = model.generate([1, 2], 45, speculation=forced("model", window))
        assert list(result.ids) == expected
        assert result.stats.accepted == result.stats.bonus == 0
        assert result.stats.evaluated == 43  # every round but the first and the last, which has no room
        assert result.stats.correction == 45


def test_one_hundred_prompts_of_many_lengths(tmp_path):
    rng = np.random.default_rng(5)
    target, draft = tables(3, 0.4)
    model = load(toy_bundle(tmp_path / "toy.dsmodel", target, draft, max_length=128), verify="never")
    for _ in range(100):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 60)).tolist()
        assert list(model.generate(prompt, 64).ids) == greedy_reference(target, prompt, 64)


def test_counters_account_for_every_token(tmp_path):
    target, draft = tables(8, 0.4)
    model = load(toy_bundle(tmp_path / "toy.dsmodel", target, draft, eos_ids=(4,)), verify="never")
    for window in range(1, 9):
        stats = model.generate([3, 1], speculation=forced("model", window)).stats
        assert stats.emitted + stats.discarded == stats.accepted + stats.correction + stats.bonus
        assert stats.proposed >= stats.evaluated >= stats.accepted
        assert sum(stats.windows.values()) == stats.rounds
        assert sum(stats.position_evaluated.values()) == stats.evaluated
        assert sum(stats.position_accepted.values()) == stats.accepted


def test_the_same_bundle_takes_the_same_decisions_every_time(tmp_path):
    target, draft = tables(8, 0.4)
    path = toy_bundle(tmp_path / "toy.dsmodel", target, draft)
    seen = set()
    for _ in range(20):
        stats = load(path, verify="never").generate([3, 1], 50).stats
        seen.add((stats.proposed, stats.evaluated, stats.accepted, stats.rounds, tuple(stats.windows.items())))
    assert len(seen) == 1
    assert stats.proposed > 0
