import numpy as np
import pytest
from toy_bundle import toy_bundle

from dsc.bundle_schema.dflash_config import MAX_WINDOW, DflashConfig, Proposer
from dsc.bundle_schema.dflash_config import ContinuationCache as CacheConfig
from dsc.runtime import load
from dsc.runtime.continuation_cache import SEGMENT, ContinuationCache, ContinuationProposer, anchor
from dsc.runtime.semantic_cut import HISTORY, SPAN, SemanticCut

VOCAB = 700


def text(*topics: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Logits of a text that stays with each (topic, number of tokens) in turn."""
    rng = np.random.default_rng(seed)
    means = [np.random.default_rng(100 + topic).normal(size=VOCAB) for topic, _ in topics]
    rows = [mean + 1.5 * rng.normal(size=(n, VOCAB)) + 20 for mean, (_, n) in zip(means, topics, strict=True)]
    return np.concatenate(rows).astype(np.float32)


def places(rows: np.ndarray, block: int, threshold: float = 0.2) -> list[int]:
    cutter = SemanticCut(threshold)
    found = []
    for start in range(0, len(rows), block):
        piece = rows[start : start + block]
        found += [start + len(piece) - 1 - back for back in cutter.see(cutter.sample(piece))]
    return found


@pytest.mark.parametrize("block", [1, 3, 17])
def test_a_jump_is_found_at_its_place_however_the_text_was_divided(block):
    rows = text((1, 100), (2, 90), (3, 80), seed=3)
    found = places(rows, block)
    assert len(found) == 2
    assert np.abs(np.array(found) - [100, 190]).max() <= 2
    assert found == places(rows, 1)


def test_a_text_that_stays_with_its_topic_has_no_jump():
    assert places(text((1, 400), seed=1), 5) == []


def test_a_text_needs_a_history_before_it_can_jump():
    rows = text((1, HISTORY + SPAN - 4), (2, 100), seed=2)
    assert all(place >= HISTORY + SPAN for place in places(rows, 4))


def test_the_threshold_of_minus_one_never_cuts():
    assert places(text((1, 100), (2, 100)), 5, threshold=-1.0) == []


def test_banned_tokens_and_what_is_no_number_carry_no_weight():
    rows = text((1, 100), (2, 100), seed=3)
    expected = places(rows, 5)
    rows[:, ::7] = -np.inf
    rows[150, ::5] = np.nan
    found = places(rows, 5)
    assert len(found) == len(expected) == 1
    assert abs(found[0] - expected[0]) <= 2


def test_the_input_is_left_alone():
    rows = text((1, 80))
    before = rows.copy()
    cutter = SemanticCut(0.2)
    cutter.see(cutter.sample(rows))
    assert (rows == before).all()


# --- what the continuation cache makes of it


def test_a_passage_is_known_behind_another_beginning():
    rng = np.random.default_rng(5)
    passage = rng.integers(0, 50, 200).tolist()
    one, other = rng.integers(0, 50, 90).tolist(), rng.integers(0, 50, 70).tolist()
    cache = ContinuationCache(CacheConfig())
    cache.remember(one + passage, 10, [len(one)])
    for cut, known in ((True, True), (False, False)):
        proposer = ContinuationProposer(cache, 12)
        right = 0
        for end in range(12, len(other) + len(passage), 4):
            tokens = (other + passage)[:end]
            if cut and end >= len(other) + 32 and proposer._start == 0:
                proposer.cut(len(other))
            if proposer.look(tokens):
                drafts = proposer.propose(tokens, 4)
                assert len(drafts) == min(4, proposer.room(tokens))
                assert drafts == (other + passage)[end : end + len(drafts)]
                right += len(drafts)
        assert (right > 150) == known


def test_a_whole_text_is_still_proposed_across_its_jumps():
    tokens = np.random.default_rng(6).integers(0, 50, 400).tolist()
    cache = ContinuationCache(CacheConfig())
    cuts = [130, 260]
    cache.remember(tokens, 10, cuts)
    proposer = ContinuationProposer(cache, 10)
    for end in range(10, 400, 5):
        for cut in cuts:
            if cut + 32 <= end < cut + 37:
                proposer.cut(cut)
        assert proposer.look(tokens[:end])
        assert proposer.propose(tokens[:end], 5) == tokens[end : end + 5]


def test_near_places_share_a_start():
    tokens = np.random.default_rng(7).integers(0, 40_000, 500).tolist()
    same = sum(anchor(tokens, place) == anchor(tokens, place + 1) for place in range(400))
    assert same / 400 > 0.75
    assert all(place <= anchor(tokens, place) < place + 8 for place in range(400))


def test_a_jump_is_known_before_what_the_old_space_knows_may_end():
    """However rows wait for each other; a text that is repeated as a whole has no gap then."""
    latest = 3 * SPAN + MAX_WINDOW - 1  # tokens after the jump
    rows = text((1, 130), (2, 120), seed=3)
    for first in range(1, SPAN):
        cutter, found, end = SemanticCut(0.2), [], 0
        for size in [1] * (MAX_WINDOW + first) + [SPAN - 1, MAX_WINDOW + 1] * 8:
            piece, end = rows[end : end + size], end + size
            found += cutter.see(cutter.sample(piece)) if len(piece) else []
        assert len(found) == 1
        assert 2 * SPAN - 1 <= found[0] < latest
    tokens = np.random.default_rng(8).integers(0, 50, 400).tolist()
    cut = 10 + 2 * SEGMENT  # its last key before is a whole segment away
    cache = ContinuationCache(CacheConfig())
    cache.remember(tokens, 10, [cut])
    proposer = ContinuationProposer(cache, 10)
    for end in range(10, 400):
        if end == cut + latest:
            proposer.cut(cut)
        assert proposer.look(tokens[:end]), end
        assert proposer.propose(tokens[:end], 1) == [tokens[end]]


@pytest.fixture(scope="module")
def chains(tmp_path_factory):
    """A model that goes on by one from any token; tokens 80 and 160 lead to the same passage from 160 on."""
    rng = np.random.default_rng(9)
    table = rng.normal(size=(400, 400)).astype(np.float32)
    table += np.repeat(rng.normal(size=(3, 400)), [80, 80, 240], axis=0) * 2
    following = np.arange(1, 401) % 400
    following[79] = 160
    table[np.arange(400), following] = 30
    config = DflashConfig(proposers={"cache": Proposer()})
    folder = tmp_path_factory.mktemp("toy")
    path = toy_bundle(folder / "toy.dsmodel", table, max_length=300, config=config, history=False)
    return path, table


def follow(table: np.ndarray, token: int, count: int) -> list[int]:
    ids = []
    for _ in range(count):
        token = int(table[token].argmax())
        ids.append(token)
    return ids


def only_the_likeliest(logits, tokens, drafts):
    """A grammar that allows one token a row."""
    likeliest = logits.argmax(axis=1)
    logits[:] = -np.inf
    logits[np.arange(len(logits)), likeliest] = 0


@pytest.mark.parametrize("processors", [(), (only_the_likeliest,)])
@pytest.mark.parametrize(("cut", "helped"), [(0.2, True), (-1.0, False)])
def test_a_request_profits_from_what_followed_another_beginning(chains, cut, helped, processors):
    path, table = chains
    model = load(path, verify="never")
    model.update_config({"cache.semantic_cut": cut})
    options = {"proposer": "cache", "fallback": False}
    accepted = []
    for prompt in ([1], [81]):
        result = model.generate(prompt, 250, speculation=options, processors=processors)
        assert list(result.ids) == follow(table, prompt[0], 250)
        accepted.append(result.stats.accepted)
    assert accepted[0] == 0
    assert (accepted[1] > 60) == helped
