"""Bundles whose first layer keeps a ring of rows: the output is that of a bundle that keeps them all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from forward_graphs import VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_bundle import packed_bundle

from dsc.bundle_schema.kv_layout import Ring, ring_of
from dsc.bundle_schema.manifest import DraftEntry
from dsc.compiler.gate_costs import PIECE, measure_costs
from dsc.kernels.native import find_library
from dsc.runtime import load

WINDOW, LENGTH, RING_ROWS = 40, 700, 256
RNG = np.random.default_rng(5)
TEXT = RNG.integers(0, VOCAB, LENGTH).tolist()
OTHER = RNG.integers(0, VOCAB, LENGTH).tolist()
EVERY_ROUND = {"proposer": "ngram", "fallback": False}
LOST = "the ring of a sliding window has written over what the prompt needs of a known text"


@pytest.fixture(scope="module", autouse=True)
def native():
    if find_library().path is None:
        pytest.skip(find_library().reason)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return packed_bundle(tmp_path_factory.mktemp("ring") / "ring.dsmodel", LENGTH, window=WINDOW)


@pytest.fixture(scope="module")
def model(path):
    return load(path, kernels="native", verify="never")


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """The same with all rows in every layer."""
    folder = tmp_path_factory.mktemp("long")
    return load(packed_bundle(folder / "long.dsmodel", LENGTH, window=WINDOW, rings=False), verify="never")


def rows_of(model):
    return [slot.rows for slot in model.bundle.arena.plan.slots if slot.role == "k"]


def test_the_plan_has_a_ring_where_the_graph_allows_it(model, long):
    assert rows_of(model) == [RING_ROWS, 768]
    assert rows_of(long) == [768, 768]
    assert ring_of(model.bundle.arena.plan, "target") == Ring(RING_ROWS, RING_ROWS - WINDOW)
    assert model.bundle.target.session.chunk == RING_ROWS - WINDOW


@pytest.mark.parametrize("speculation", ["off", *({**EVERY_ROUND, "window": k} for k in (1, 3, 8, 16))], ids=str)
@pytest.mark.parametrize("n_prompt", [1, WINDOW, RING_ROWS - 3, RING_ROWS + 1, 600])
def test_output_is_that_of_a_bundle_without_rings(model, long, n_prompt, speculation):
    prompt = (TEXT[:20] * 40)[:n_prompt]
    wanted = long.generate(prompt, 90, speculation="off", ignore_eos=True)
    found = model.generate(prompt, 90, speculation=speculation, ignore_eos=True, reuse_cache=False)
    assert found.ids == wanted.ids


def test_graphs_that_keep_positions_where_they_are_get_all_rows(path, model):
    plain = load(path, kernels="ort", verify="never")
    assert rows_of(plain) == [768, 768]
    prompt = TEXT[:400]
    assert plain.generate(prompt, 60, speculation="off").ids == model.generate(prompt, 60, speculation="off").ids


def test_a_short_limit_needs_no_ring(path):
    short = load(path, kernels="native", max_length=200, verify="never")
    assert rows_of(short) == [256, 256]
    assert ring_of(short.bundle.arena.plan, "target") is None


def test_a_text_that_ends_where_the_prompt_leaves_it_helps(model):
    model.reset()
    first = model.generate(TEXT[:400], 10, reuse_cache=True)
    model.generate(OTHER[:300], 10, reuse_cache=True)
    again = model.generate([*TEXT[:400], *first.ids, 1, 2], 10, reuse_cache=True).stats
    assert again.restored_tokens >= 400
    assert again.prefix_reason == ""


def test_a_prompt_that_leaves_a_known_text_too_early_is_read_again_and_says_why(model):
    model.reset()
    model.generate(TEXT[:400], 10, reuse_cache=True)
    branch = model.generate([*TEXT[:150], 3], 10, reuse_cache=True)
    assert (branch.stats.cached_tokens, branch.stats.prefix_reason) == (0, LOST)
    assert branch.ids == model.generate([*TEXT[:150], 3], 10, reuse_cache=False).ids


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([TEXT, OTHER]), st.integers(1, 600), st.integers(0, 3)), max_size=8))
def test_output_is_the_same_whatever_was_read_before(model, long, prompts):
    model.reset()
    for text, cut, tail in prompts:
        prompt = [*text[:cut], *range(tail)]
        found = model.generate(prompt, 12, reuse_cache=True, speculation={**EVERY_ROUND, "window": 5})
        assert found.ids == long.generate(prompt, 12, speculation="off", reuse_cache=False).ids


def test_a_generation_that_fails_in_a_forward_leaves_a_ring_usable(model, long, monkeypatch):
    model.reset()
    prompt = TEXT[:500]
    model.generate(prompt, 5, reuse_cache=True)
    forward = model.bundle.target.session.forward

    def fails(tokens, past, n_logits):
        forward(tokens, past, n_logits)
        raise RuntimeError("after the rows were written")

    monkeypatch.setattr(model.bundle.target.session, "forward", fails)
    with pytest.raises(RuntimeError):
        model.generate([*prompt, *OTHER[:210]][:690], 5, reuse_cache=True)
    monkeypatch.undo()
    for after in (prompt[:350], prompt, [*prompt, *OTHER[:3]]):
        found = model.generate(after, 8, reuse_cache=True)
        assert found.ids == long.generate(after, 8, reuse_cache=False, speculation="off").ids


def test_sequences_of_an_engine_have_rings_of_their_own(model, long):
    prompts = [TEXT[:n] for n in (5, 260, 600, 300)] + [OTHER[:n] for n in (450, 80)]
    wanted = [long.generate(prompt, 40, speculation="off").ids for prompt in prompts]
    with model.engine(slots=3) as engine:
        tickets = [engine.submit(prompt, max_new_tokens=40, reuse_cache=True) for prompt in prompts * 2]
        assert [ticket.result().ids for ticket in tickets] == wanted * 2
        stats = engine.stats()
    assert stats["forwards"] == stats["rounds"]
    assert stats["split_rounds"] == 0


def plain_ids(long, prompt, n_tokens):
    return long.generate(prompt, n_tokens, speculation="off", ignore_eos=True, reuse_cache=False).ids


@pytest.mark.parametrize(("limit", "n_prompt"), [(190, 150), (60, 40)])
def test_a_text_that_a_ring_held_is_judged_by_that_ring_when_the_arena_has_none(model, long, limit, n_prompt):
    """The engine's saved texts outlive a change of its length."""
    prompt = [*TEXT[:n_prompt], 3]
    with model.engine(slots=2, background=False) as engine:
        engine.submit(TEXT[:400], max_new_tokens=10, reuse_cache=True).result()
        engine.resize(limit)
        engine.run()
        engine.step()
        found = engine.submit(prompt, max_new_tokens=15, reuse_cache=True, ignore_eos=True).result()
    assert found.ids == plain_ids(long, prompt, 15)
    assert (found.stats.restored_tokens, found.stats.prefix_reason) == (0, LOST)


def test_what_a_ring_had_lost_stays_lost_when_the_sequence_moves(tmp_path):
    """A text is restored, its sequence crosses a change of length and is saved again, and restored shorter."""
    folder = [packed_bundle(tmp_path / f"{rings}.dsmodel", LENGTH, window=2, rings=rings) for rings in (True, False)]
    ring, long = (load(path, kernels="native", verify="never") for path in folder)
    options = {"reuse_cache": True, "ignore_eos": True, "speculation": "off"}
    with ring.engine(slots=2, background=False) as engine:
        engine.submit(TEXT[:290], max_new_tokens=10, reuse_cache=True).result()
        first = engine.submit([*TEXT[:60], 3], max_new_tokens=30, **options)
        for _ in range(4):
            engine.step()
        engine.resize(190)
        assert first.result().ids == plain_ids(long, [*TEXT[:60], 3], 30)
        engine.run()
        engine.step()
        for n_prompt in (40, 50, 59):
            prompt = [*TEXT[:n_prompt], 5]
            assert engine.submit(prompt, max_new_tokens=12, **options).result().ids == plain_ids(long, prompt, 12)


def test_texts_go_on_from_a_ring_into_an_arena_of_another_size(model, long):
    """Up to what a ring holds from its start nothing is lost, whichever arena the text was saved from."""
    with model.engine(slots=2, background=False) as engine:
        for limit, n_prompt, restored in ((LENGTH, 180, 0), (220, 190, 180), (LENGTH, 195, 190), (200, 150, 150)):
            engine.resize(limit)
            engine.step()
            prompt = [*TEXT[:n_prompt], 7]
            found = engine.submit(prompt, max_new_tokens=5, reuse_cache=True, ignore_eos=True).result()
            assert found.ids == plain_ids(long, prompt, 5)
            assert found.stats.restored_tokens == restored


def test_prompts_and_drafts_share_a_forward_however_many_prompts_are_read(model):
    """Rings limit the rows of a sequence, not those of a run."""
    prompts = [TEXT[n : n + 300] for n in range(0, 300, 30)]
    with model.engine(slots=3, prefill_stretch=50) as engine:
        tickets = [engine.submit(prompt, max_new_tokens=20) for prompt in prompts]
        assert all(ticket.result().ids for ticket in tickets)
        assert engine.stats()["split_rounds"] == 0


def test_costs_after_a_long_text_are_those_of_a_draft_that_has_read_it(tmp_path, monkeypatch):
    """A ring cannot be wound back by a whole piece: less is read anew, and the draft's length stays."""
    model = load(packed_bundle(tmp_path / "r.dsmodel", 1400, window=WINDOW), kernels="native", verify="never")
    draft = load(packed_bundle(tmp_path / "d.dsmodel", 1400, window=WINDOW), kernels="native", verify="never")
    lengths = []
    forward = draft.bundle.target.forward

    def watched(rows, n_logits):
        lengths.append(draft.bundle.target.length)
        return forward(rows, n_logits)

    monkeypatch.setattr(draft.bundle.target, "forward", watched)
    entry = draft.bundle.manifest.target
    both = replace(
        model.bundle,
        draft=draft.bundle.target,
        manifest=model.bundle.manifest.model_copy(update={"draft": DraftEntry(kind="model", model=entry)}),
    )
    monkeypatch.setattr(model, "bundle", both)
    assert len(measure_costs(model, [TEXT[:20]])) == 2
    assert lengths[-1] == 1024
    assert min(lengths[-20:]) > 1024 - PIECE
