"""Filters hold for every token of a block: for drafts that held, for the correction and for the bonus."""

import numpy as np
import pytest
from scripted_text import DRAFT, TARGET, VOCAB
from toy_bundle import toy_bundle
from verdict_law import plain_distribution

from dsc.bundle_schema.dflash_config import DflashConfig, Proposer
from dsc.runtime import load

FILTERS = [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.25}, {"top_k": 7, "top_p": 0.8, "min_p": 0.1}]
WINDOWS = {"self": 2, "ngram": 1}  # longer blocks hold whole too rarely here
BANNED = 4
N_TOKENS = 1250


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = DflashConfig(proposers={"self": Proposer(), "ngram": Proposer(min_match=1)})
    path = tmp_path_factory.mktemp("toy") / "toy.dsmodel"
    bundle = toy_bundle(path, TARGET, DRAFT, draft_kind="self", max_length=4096, config=config)
    return load(bundle, verify="never")


def allowed(tokens, sampling):
    """What plain sampling may say after each of `tokens`: bool [n, VOCAB]."""
    supports = np.stack([plain_distribution(row, **sampling) > 0 for row in TARGET])
    tokens = np.asarray(tokens)
    earlier = np.concatenate([[0], np.cumsum(tokens * (np.arange(len(tokens)) % 7 + 1))[:-1]])
    return supports[(tokens + earlier) % VOCAB]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("proposer", ["self", "ngram"])
def test_no_token_of_a_block_is_outside_the_filters(model, proposer, filters):
    sampling = {"temperature": 1.2, **filters}
    speculation = {"proposer": proposer, "window": WINDOWS[proposer], "fallback": False}
    result = model.generate([1], N_TOKENS, sampling, seed=4, speculation=speculation)
    may = allowed([1, *result.ids][:-1], sampling)
    assert 0.1 < may.mean() < 0.9
    assert may[np.arange(N_TOKENS), result.ids].all()
    stats = result.stats
    assert min(stats.accepted, stats.correction, stats.bonus) > 20
    assert result.ids == model.generate([1], N_TOKENS, sampling, seed=4, speculation="off").ids


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_no_token_of_an_engine_s_sequences_is_outside_their_filters(model, filters):
    """Each sequence has filters of its own."""
    samplings = [{"temperature": 1.2, **filters}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 2}]
    speculation = {"proposer": "self", "window": 3, "fallback": False}
    with model.engine(slots=3) as engine:
        tickets = [
            engine.submit([1], max_new_tokens=300, sampling=sampling, seed=seed, speculation=speculation)
            for seed, sampling in enumerate(samplings)
        ]
        results = [ticket.result() for ticket in tickets]
    for seed, (sampling, result) in enumerate(zip(samplings, results, strict=True)):
        assert allowed([1, *result.ids][:-1], sampling)[np.arange(300), result.ids].all()
        assert result.ids == model.generate([1], 300, sampling, seed=seed, speculation="off").ids


@pytest.mark.parametrize("proposer", ["self", "ngram"])
def test_a_processor_s_ban_holds_for_every_token_of_a_sampled_block(model, proposer):
    def ban(logits, history, drafts):
        logits[:, BANNED] = -np.inf

    sampling = {"temperature": 1.2, "top_p": 0.9}
    speculation = {"proposer": proposer, "window": WINDOWS[proposer], "fallback": False}
    options = {"max_new_tokens": 600, "sampling": sampling, "seed": 4}
    free = model.generate([1], **options, speculation=speculation)
    result = model.generate([1], **options, speculation=speculation, processors=[ban])
    assert BANNED in free.ids
    assert BANNED not in result.ids
    assert min(result.stats.accepted, result.stats.correction, result.stats.bonus) > 10
    assert result.ids == model.generate([1], **options, speculation="off", processors=[ban]).ids
