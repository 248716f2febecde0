"""The distribution of sampled output, the reach of filters and penalties, and what a seed fixes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_bundle import toy_bundle

from dsc.bundle_schema.errors import GenerationError
from dsc.runtime import SamplingParams, load
from dsc.runtime.sampling import LogitsEditor, UniformDraws
from dsc.runtime.verify import SampledChooser, verifier_for

VOCAB = 9
RNG = np.random.default_rng(4)
TARGET = RNG.normal(scale=1.5, size=(VOCAB, VOCAB)).astype(np.float32)
DRAFT = TARGET + 0.5 * RNG.normal(size=TARGET.shape).astype(np.float32)
FILTERS = [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8, "min_p": 0.1}]


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Sort, filter, renormalise: the definition, for one row."""
    p = np.exp(logits.astype(np.float64) / params.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p - 1e-12]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def chi_square_is_plausible(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Pearson's statistic within 5 standard deviations of its mean, nothing outside the support."""
    if counts[expected == 0].any():
        return False
    seen = expected > 0
    statistic = float((((counts - expected) ** 2)[seen] / expected[seen]).sum())
    freedom = int(seen.sum()) - 1
    return statistic <= freedom + 5 * np.sqrt(2 * max(freedom, 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "toy.dsmodel"
    return load(toy_bundle(path, TARGET, DRAFT, max_length=4096), verify="never")


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_one_row_has_the_filtered_distribution(temperature, filters):
    params = SamplingParams(temperature=temperature, **filters)
    row, n = TARGET[0], 20_000
    chooser, draws = SampledChooser(params), UniformDraws(1).at(0, n)
    counts = np.bincount([chooser.choose(row, u) for u in draws], minlength=VOCAB)
    assert chi_square_is_plausible(counts, n * distribution(row, params))


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**16),
    vocab=st.sampled_from([2, 5, 300, 3000]),
    top_k=st.sampled_from([0, 1, 4, 400]),
    top_p=st.sampled_from([1.0, 0.999, 0.7, 0.05]),
    min_p=st.sampled_from([0.0, 0.03]),
)
def test_the_candidates_are_those_of_the_definition(seed, vocab, top_k, top_p, min_p):
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    row = np.random.default_rng(seed).normal(size=vocab).astype(np.float32)
    p = distribution(row, params)
    cumulative = np.cumsum(p)
    chooser = SampledChooser(params)
    for u in (0.0, 0.25, 0.5, 0.9, 0.999):
        token = chooser.choose(row, u)
        assert p[token] > 0
        assert cumulative[token] - p[token] - 1e-4 <= u <= cumulative[token] + 1e-4


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("proposer", ["ngram", "model"])
def test_sequences_with_speculation_have_the_target_s_distribution(model, temperature, proposer):
    """Thousands of tokens of long generations; each is compared with its own row's distribution."""
    params = SamplingParams(temperature=temperature, top_p=0.9)
    counts, expected, n_outside = np.zeros(VOCAB), np.zeros(VOCAB), 0
    stats_accepted = 0
    for seed in range(5):
        result = model.generate(
            [seed], 4000, params, seed=seed, speculation={"proposer": proposer, "window": 3, "fallback": False}
        )
        stats_accepted += result.stats.accepted
        tokens = np.array([seed, *result.ids])
        weighted = np.arange(len(tokens)) % 7 + 1
        earlier = np.concatenate([[0], np.cumsum(tokens * weighted)[:-1]])
        states = (tokens + earlier)[:-1] % VOCAB
        by_state = np.stack([distribution(row, params) for row in TARGET])
        np.add.at(counts, tokens[1:], 1)
        expected += by_state[states].sum(axis=0)
        n_outside += int((by_state[states, tokens[1:]] == 0).sum())
    assert stats_accepted > 200
    assert n_outside == 0
    assert chi_square_is_plausible(counts, expected)


def test_a_seed_fixes_the_output_and_another_changes_it(model):
    params = {"temperature": 1.0}
    runs = [model.generate([1], 60, params, seed=seed).ids for seed in (7, 7, 7, 8, 9, 10)]
    assert runs[0] == runs[1] == runs[2]
    assert len(set(runs)) == 4


def test_a_drawn_seed_is_reported_and_repeats_the_run(model):
    first = model.generate([1], 60, {"temperature": 1.0})
    assert first.stats.seed is not None
    assert model.generate([1], 60, {"temperature": 1.0}, seed=first.stats.seed).ids == first.ids


def test_draws_do_not_depend_on_how_they_are_asked_for():
    whole = UniformDraws(3).at(0, 1000)
    pieces = UniformDraws(3)
    assert [pieces.at(i, 1)[0] for i in (999, 0, 500, 255, 256)] == [whole[i] for i in (999, 0, 500, 255, 256)]
    assert ((whole >= 0) & (whole < 1)).all()
    assert abs(whole.mean() - 0.5) < 0.05


def test_penalties_follow_each_row_s_own_history():
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={5: 3.0})
    editor = LogitsEditor(params, VOCAB, n_prompt=2)
    tokens, drafts = [1, 2, 3, 3], [4, 3]
    logits = np.tile(np.array([1, -1, 1, 1, 1, -1, 1, 1, 1], np.float32), (3, 1))
    editor(logits, tokens, drafts)
    for i, row in enumerate(logits):
        history = tokens + drafts[:i]
        for token in range(VOCAB):
            value = -1.0 if token in (1, 5) else 1.0
            if token in history:
                value = value / 2 if value > 0 else value * 2
            n = history[2:].count(token)
            value -= 0.5 * (n > 0) + 0.25 * n
            value += 3.0 * (token == 5)
            assert row[token] == pytest.approx(value), (i, token)


def test_a_greedy_penalty_changes_plain_and_speculative_output_alike(model):
    params = {"repetition_penalty": 1.5, "frequency_penalty": 0.2}
    plain = model.generate([1, 2], 80, params, speculation="off").ids
    for proposer in ("ngram", "model"):
        spec = {"proposer": proposer, "window": 4, "fallback": False}
        assert model.generate([1, 2], 80, params, speculation=spec).ids == plain
    assert plain != model.generate([1, 2], 80).ids


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_an_error_and_no_token(model, filters, bad):
    """One NaN or infinity among the logits, or nothing but minus infinity."""

    def spoil(logits, history, drafts):
        logits[:, 3 if bad != -np.inf else slice(None)] = bad

    sampling = {"temperature": 1.0, "seed": 1, **filters}
    with pytest.raises(GenerationError, match="a token with a finite logit is required"):
        model.generate([1], 3, sampling=sampling, processors=[spoil])


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-39, 1e-6, 1e-5, 1e-4])
def test_the_coldest_temperatures_are_greedy(model, temperature):
    greedy = model.generate([1, 2], 20)
    assert model.generate([1, 2], 20, sampling={"temperature": temperature, "seed": 3}).ids == greedy.ids


def test_the_largest_biases_ban_and_force(model):
    for sampling in ({}, {"temperature": 1e-5, "seed": 1}, {"temperature": 1.0, "seed": 1, "top_p": 0.9}):
        bias = {token: -1e30 for token in range(VOCAB) if token != 4}
        assert set(model.generate([1], 9, sampling={**sampling, "logit_bias": bias}).ids) == {4}
        assert set(model.generate([1], 9, sampling={**sampling, "logit_bias": {4: 1e30}}).ids) == {4}


def test_ties_go_to_the_first_token():
    verdict = verifier_for(SamplingParams()).verify(np.ones((2, 4), np.float32), [0], np.zeros(2))
    assert (verdict.accepted, verdict.next_token) == (1, 0)
