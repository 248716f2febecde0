import numpy as np
import pytest
from forward_graphs import VOCAB as FORWARD_VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_bundle import packed_bundle
from scripted_lm import greedy_reference
from toy_bundle import toy_bundle, toy_plan

from dsc.bundle_schema.dflash_config import DflashConfig, Proposer
from dsc.kernels.native import find_library
from dsc.runtime import load
from dsc.runtime.kv_arena import KvArena
from dsc.runtime.prefix_cache import LEAST_ROWS, PrefixCache

VOCAB = 13
RNG = np.random.default_rng(11)
TARGET = RNG.normal(size=(VOCAB, VOCAB)).astype(np.float32)
ONE = [int(token) for token in RNG.integers(0, VOCAB, 40)]
OTHER = [int(token) for token in RNG.integers(0, VOCAB, 30)]
OPTIONS = ["off", "auto", {"proposer": "self", "window": 5, "fallback": False}]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    return toy_bundle(folder / "toy.dsmodel", TARGET, TARGET, draft_kind="self", max_length=96)


@pytest.fixture(scope="module")
def model(path):
    return load(path, verify="never")


def run(model, prompt, speculation="auto", n_tokens=20):
    result = model.generate(prompt, n_tokens, speculation=speculation, reuse_cache=True)
    assert list(result.ids) == greedy_reference(TARGET, prompt, n_tokens)
    return result.stats


@pytest.mark.parametrize("speculation", OPTIONS, ids=["off", "auto", "self"])
def test_a_prompt_that_was_displaced_is_not_read_again(model, speculation):
    model.reset()
    hits = model.prefixes.counts.hits
    assert run(model, ONE, speculation).restored_tokens == 0
    assert run(model, OTHER, speculation).cached_tokens == 0
    again = run(model, ONE, speculation)
    assert (again.restored_tokens, again.cached_tokens) == (len(ONE) - 1, len(ONE) - 1)
    longer = run(model, [*OTHER, 1, 2, 3], speculation)
    assert longer.restored_tokens >= len(OTHER)
    assert model.prefixes.counts.hits == hits + 2


def test_what_the_live_cache_holds_is_not_copied(model):
    model.reset()
    run(model, ONE)
    again = run(model, ONE)
    assert (again.restored_tokens, again.cached_tokens) == (0, len(ONE) - 1)


def test_nothing_is_kept_unless_asked_for(path):
    model = load(path, verify="never")
    for prompt in (ONE, OTHER, ONE):
        assert model.generate(prompt, 5).stats.cached_tokens == 0
    assert len(model.prefixes) == 0
    model.update_config({"cache.reuse_prefixes": True})
    for prompt in (OTHER, ONE):
        stats = model.generate(prompt, 5).stats
    assert stats.restored_tokens == len(ONE) - 1
    assert model.generate(ONE, 5, reuse_cache=False).stats.cached_tokens == 0


def test_two_conversations_in_turn_keep_their_rows(model):
    model.reset()
    texts = [list(ONE), list(OTHER)]
    for turn in range(3):
        for text in texts:
            stats = run(model, text, n_tokens=5)
            assert (stats.cached_tokens > 0) == (turn > 0)
            text += [*greedy_reference(TARGET, text, 5), turn]


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from([ONE, OTHER]), st.integers(1, 30), st.lists(st.integers(0, 12), max_size=30))),
    st.integers(0, 5000),
)
def test_output_is_the_same_for_any_prompts_and_any_budget(model, prompts, budget):
    model.reset()
    model.update_config({"cache.prefix_max_nbytes": budget})
    for text, cut, tail in prompts:
        run(model, [*text[:cut], *tail], n_tokens=6)
        assert model.prefixes.nbytes <= budget
    model.update_config({"cache.prefix_max_nbytes": 2**20})


def test_secure_rollback_keeps_no_copies_and_says_so(tmp_path):
    config = DflashConfig(secure_rollback=True, proposers={"ngram": Proposer()})
    model = load(toy_bundle(tmp_path / "toy.dsmodel", TARGET, config=config), verify="never")
    for prompt in (ONE, OTHER[:20], ONE[:20]):
        stats = model.generate(prompt, 3, reuse_cache=True).stats
    assert (stats.cached_tokens, len(model.prefixes)) == (0, 0)
    assert stats.prefix_reason == "secure rollback keeps no copies"


# --- the cache by itself


def zones(n_rows):
    arena = KvArena(toy_plan(max_length=100, draft_layers=2))
    both = {"target": arena.zone("target", 100), "draft": arena.zone("draft", 100)}
    for zone in both.values():
        for number, pool in enumerate(zone.pools.values()):
            pool[0, :, :n_rows] = np.arange(n_rows)[None, :, None] + number / 8
        zone.commit(n_rows, n_rows)
    return both


def tokens(n, first=0):
    return [first, *range(1, n)]


def test_rows_come_back_as_they_were():
    cache = PrefixCache(2**20)
    source = zones(60)
    source["draft"].rewind(25)
    cache.save(tokens(60), source)
    place = zones(0)
    text, common = cache.find(np.array(tokens(40), np.int32), 1)
    assert cache.restore(text, common, place) == 40
    assert (place["target"].length, place["draft"].length) == (40, 25)
    for owner, zone in place.items():
        for name, pool in zone.pools.items():
            assert (pool[0, :, : zone.length] == source[owner].pools[name][0, :, : zone.length]).all()


def test_a_text_leaves_when_the_bytes_are_needed_least_recently_used_first():
    one = PrefixCache(2**20)
    one.save(tokens(50), zones(50))
    cache = PrefixCache(one.nbytes * 2)
    for first in (1, 2):
        cache.save(tokens(50, first), zones(50))
    assert cache.find(np.array(tokens(50, 1), np.int32), 1)
    cache.save(tokens(50, 3), zones(50))
    assert cache.find(np.array(tokens(50, 2), np.int32), 1) is None
    assert cache.find(np.array(tokens(50, 1), np.int32), 1)
    assert (len(cache), cache.counts.evictions) == (2, 1)
    cache.configure(0)
    assert (len(cache), cache.nbytes) == (0, 0)


def test_a_longer_text_replaces_its_beginning_and_never_the_other_way_round():
    cache = PrefixCache(2**20)
    for n_rows in (50, 70, 60):
        cache.save(tokens(70), zones(n_rows))
    assert (len(cache), cache.counts.saved) == (1, 2)
    assert len(cache.find(np.array(tokens(70), np.int32), 1)[0].tokens) == 70


def test_texts_too_large_or_too_short_are_not_saved():
    cache = PrefixCache(500)
    cache.save(tokens(90), zones(90))
    cache.save(tokens(LEAST_ROWS - 1), zones(LEAST_ROWS - 1))
    assert (len(cache), cache.counts.too_large) == (0, 1)


def test_a_short_match_is_not_worth_a_copy():
    cache = PrefixCache(2**20)
    cache.save(tokens(50), zones(50))
    ids = np.array([*tokens(LEAST_ROWS - 1), 99, 99], np.int32)
    assert cache.find(ids, 1) is None


# --- in an engine


@pytest.mark.parametrize("kernels", ["native", "ort"])
def test_an_engine_keeps_the_prompts_of_finished_requests(tmp_path, kernels):
    if kernels == "native" and find_library().path is None:
        pytest.skip(find_library().reason)
    model = load(packed_bundle(tmp_path / "tiny.dsmodel"), kernels=kernels, verify="never")
    prompt = np.random.default_rng(3).integers(0, FORWARD_VOCAB, 60).tolist()
    plain = model.generate(prompt, 12).ids
    with model.engine(slots=2) as engine:
        for reuse, restored in ((True, 0), (True, len(prompt) - 1), (False, 0), (None, 0)):
            result = engine.submit(prompt, max_new_tokens=12, reuse_cache=reuse).result()
            assert (result.stats.restored_tokens, result.stats.cached_tokens) == (restored, restored)
            assert result.ids == plain
        beginning = engine.submit([*prompt[:40], 1, 2], max_new_tokens=3, reuse_cache=True).result()
        assert beginning.stats.restored_tokens == 40
