import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_lm import greedy_reference
from toy_bundle import toy_bundle

from dsc.bundle_schema.dflash_config import CalibratedPolicy, DflashConfig, Proposer
from dsc.bundle_schema.dflash_config import ContinuationCache as CacheConfig
from dsc.bundle_schema.errors import HostError, RequestError
from dsc.runtime import load
from dsc.runtime.continuation_cache import SEGMENT, ContinuationCache, ContinuationProposer

TOKENS = st.lists(st.integers(0, 30), min_size=1, max_size=300)


def numbers(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 40, n).tolist()


def follow(cache: ContinuationCache, text: list[int], n_prompt: int, step: int = 5) -> tuple[int, int]:
    """Walk through `text` in rounds of `step`; how many drafts were right, and how many were made."""
    proposer = ContinuationProposer(cache, n_prompt)
    right = made = 0
    for end in range(n_prompt, len(text), step):
        if proposer.look(text[:end]) is None:
            continue
        drafts = proposer.propose(text[:end], min(step, proposer.room(text[:end])))
        made += len(drafts)
        right += sum(a == b for a, b in zip(drafts, text[end:], strict=False))
    return right, made


@pytest.mark.parametrize("step", [1, 5, 7, 16])
def test_a_repeated_text_is_proposed_to_its_end(step):
    cache = ContinuationCache(CacheConfig())
    text = numbers(0, 300)
    cache.remember(text, 20)
    assert follow(cache, text, 20, step) == (280, 280)
    assert follow(cache, text, 21, step) == (0, 0)  # the same tokens with another prompt are another place


def test_another_ending_is_dropped_where_it_parts():
    cache = ContinuationCache(CacheConfig())
    text, other = numbers(0, 200), numbers(1, 100)
    cache.remember(text, 20)
    right, made = follow(cache, text[:100] + other, 20)
    assert right >= 80
    assert made <= 90


def test_the_newest_continuation_counts_and_agreement_is_counted():
    cache = ContinuationCache(CacheConfig())
    text, newer = numbers(0, 60), [*numbers(0, 30), *numbers(3, 30)]
    cache.remember(text, 10)
    assert ContinuationProposer(cache, 10).look(text[:10]) == "once"
    cache.remember(text, 10)
    assert ContinuationProposer(cache, 10).look(text[:10]) == "often"
    cache.remember(newer, 10)
    assert ContinuationProposer(cache, 10).look(text[:10]) == "once"
    assert follow(cache, newer, 10) == (50, 50)


@settings(max_examples=40)
@given(st.lists(TOKENS, min_size=1, max_size=8), st.sampled_from([1, 3, 64]), st.data())
def test_a_match_is_always_proven_on_the_tokens(texts, bits, data):
    """Also with a fingerprint of one bit, where nearly everything collides."""
    cache = ContinuationCache(CacheConfig(fingerprint_bits=bits))
    known: dict[tuple[int, ...], list[int]] = {}
    for text in texts:
        n_prompt = data.draw(st.integers(1, len(text)))
        proposer = ContinuationProposer(cache, n_prompt)
        if proposer.look(text[:n_prompt]) is not None:
            drafts = proposer.propose(text[:n_prompt], proposer.room(text[:n_prompt]))
            assert drafts == known[tuple(text[:n_prompt])][: len(drafts)]
        cache.remember(text, n_prompt)
        if len(text) > n_prompt:  # a text that ends with its prompt says nothing new
            known[tuple(text[:n_prompt])] = text[n_prompt:]


def test_one_bit_collides_and_says_so():
    cache = ContinuationCache(CacheConfig(fingerprint_bits=1))
    for seed in range(20):
        cache.remember(numbers(seed, 40), 10)
    assert len(cache) <= 2
    for seed in range(20, 40):
        assert ContinuationProposer(cache, 10).look(numbers(seed, 10)) is None
    assert cache.counts.collisions > 0
    assert cache.counts.hits == 0


def test_the_least_recently_used_entries_leave_first():
    cache = ContinuationCache(CacheConfig(entries=2))
    a, b, c = (numbers(seed, 30) for seed in range(3))
    cache.remember(a, 10)
    cache.remember(b, 10)
    assert follow(cache, a, 10)[0] == 20
    cache.remember(c, 10)
    assert follow(cache, b, 10) == (0, 0)
    assert follow(cache, a, 10)[0] == follow(cache, c, 10)[0] == 20
    assert cache.counts.evictions == 1


@given(st.lists(TOKENS, max_size=10), st.integers(0, 3000), st.integers(1, 9))
def test_bytes_and_entries_stay_within_their_bounds(texts, nbytes, entries):
    cache = ContinuationCache(CacheConfig(max_nbytes=nbytes, entries=entries))
    for text in texts:
        cache.remember(text, 1)
        assert cache.nbytes <= nbytes
        assert len(cache) <= entries
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)


def test_another_process_reads_what_was_saved(tmp_path):
    path = tmp_path / "known.npz"
    cache = ContinuationCache(CacheConfig())
    for seed in range(3):
        cache.remember(numbers(seed, 200), 20)
    cache.save(path, "model")
    script = (
        "import sys, numpy as np\n"
        "from pathlib import Path\n"
        "from dsc.bundle_schema.dflash_config import ContinuationCache as Config\n"
        "from dsc.runtime.continuation_cache import ContinuationCache, ContinuationProposer\n"
        "cache = ContinuationCache(Config())\n"
        "cache.load(Path(sys.argv[1]), 'model', 40)\n"
        "text = np.random.default_rng(1).integers(0, 40, 200).tolist()\n"
        "proposer = ContinuationProposer(cache, 20)\n"
        "proposer.look(text[:20])\n"
        "print(proposer.propose(text[:20], 100) == text[20:120], len(cache))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script, path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", str(len(cache))]
    assert len(cache) == 3 * -(-180 // SEGMENT)
    assert list(tmp_path.iterdir()) == [path]


def damaged(name: str, change):
    def damage(path):
        with np.load(path) as archive:
            arrays = dict(archive)
        arrays[name] = change(arrays[name])
        np.savez(path, **arrays)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b"text"), "cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:-30]), "cannot be read"),
        (lambda path: path.unlink(), "got none"),
        (damaged("identity", lambda x: x[:-1]), "those of another"),
        (damaged("tokens", lambda x: x + 40), "damaged"),
        (damaged("tokens", lambda x: x[:-1]), "damaged"),
        (damaged("starts", lambda x: x + 1), "damaged"),
        (damaged("starts", lambda x: x.astype(float)), "damaged"),
        (damaged("prompts", lambda x: x * 0), "damaged"),
        (damaged("seen", lambda x: x[:-1]), "damaged"),
    ],
)
def test_a_damaged_or_foreign_file_adds_nothing(tmp_path, damage, message):
    path = tmp_path / "known.npz"
    cache = ContinuationCache(CacheConfig())
    cache.remember(numbers(0, 200), 20)
    cache.save(path, "model")
    damage(path)
    cache = ContinuationCache(CacheConfig())
    with pytest.raises(RequestError, match=message):
        cache.load(path, "model", 40)
    assert len(cache) == 0


def test_a_full_disk_leaves_the_older_file_and_nothing_else(tmp_path, monkeypatch):
    def full(file, **arrays):
        file.write(b"some")
        raise OSError(28, "No space left on device")

    path = tmp_path / "continuations"
    path.write_bytes(b"an older file")
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(HostError, match="cannot be written: No space left"):
        ContinuationCache(CacheConfig()).save(path, "model")
    assert path.read_bytes() == b"an older file"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(HostError, match="nowhere"):
        ContinuationCache(CacheConfig()).save(tmp_path / "nowhere" / "known.npz", "model")


TARGET = np.random.default_rng(7).normal(size=(31, 31)).astype(np.float32)


def test_the_second_run_of_a_prompt_is_proposed_from_the_cache(tmp_path):
    by_curve = CalibratedPolicy(refresh_costs=False)
    config = DflashConfig(policy="calibrated", proposers={"cache": Proposer()}, calibrated=by_curve)
    path = toy_bundle(tmp_path / "toy.dsmodel", TARGET, max_length=256, config=config)
    model = load(path, verify="never")
    expected = greedy_reference(TARGET, [1, 2, 3], 100)
    first = model.generate([1, 2, 3], 100)
    second = model.generate([1, 2, 3], 100)
    assert list(first.ids) == list(second.ids) == expected
    assert "cache" not in first.stats.proposers
    found = second.stats.proposers["cache"]
    assert found.accepted == found.proposed > 30
    counts = model.scheduler.continuations.counts
    assert counts.lookups > counts.hits > 0 == counts.collisions
    model.save_continuations(tmp_path / "known.npz")
    other = load(path, verify="never")
    assert other.load_continuations(tmp_path / "known.npz") > 0
    again = other.generate([1, 2, 3], 100).stats.proposers["cache"]
    assert again.accepted == again.proposed >= found.accepted
    model.reset()
    assert "cache" not in model.generate([1, 2, 3], 100).stats.proposers


def test_the_cache_is_off_unless_the_table_has_it(tmp_path):
    model = load(toy_bundle(tmp_path / "toy.dsmodel", TARGET), verify="never")
    model.generate([1, 2, 3], 20)
    assert "cache" not in model.proposers
    assert len(model.scheduler.continuations) == 0
