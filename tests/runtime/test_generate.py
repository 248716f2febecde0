"""Ends, limits and turns: the edges of a generation."""

import numpy as np
import pytest
from scripted_lm import greedy_reference
from scripted_text import DRAFT, PLAIN, PROMPT, SELF, TARGET, VOCAB, first_index
from toy_bundle import toy_bundle

from dsc.bundle_schema.errors import GenerationError, RequestError
from dsc.runtime import load

# --- where the output ends


def test_any_token_of_the_plain_run_may_be_the_end(model, speculation):
    for stop in sorted(set(PLAIN)):
        result = model.generate(PROMPT, 50, stop_tokens=[stop], speculation=speculation)
        assert list(result.ids) == PLAIN[: first_index(stop) + 1]
        assert result.finish_reason == "stop"
        # what comes next starts from caches that agree with the shortened output
        more = model.stream([*PROMPT, *result.ids], 5, speculation=speculation, reuse_cache=True).finish()
        assert more.stats.cached_tokens >= len(PROMPT) + len(result.ids) - 1
        assert list(more.ids) == PLAIN[first_index(stop) + 1 :][:5]


def test_only_the_target_may_end_the_output(tmp_path):
    eos = next(token for token in range(VOCAB) if token not in PLAIN[:20])
    draft = np.full_like(TARGET, -1.0)
    draft[:, eos] = 1.0
    path = toy_bundle(tmp_path / "toy.dsmodel", TARGET, draft, eos_ids=(eos,))
    result = load(path, verify="never").generate(PROMPT, 20, speculation={"window": 3, "fallback": False})
    assert list(result.ids) == PLAIN[:20]
    assert result.finish_reason == "length"
    assert result.stats.proposed > 0


def test_the_limit_is_exact_and_inside_blocks_too(model, speculation):
    for n in range(1, 20):
        result = model.generate(PROMPT, n, speculation=speculation)
        assert list(result.ids) == PLAIN[:n]
        assert result.finish_reason == "length"
        assert result.stats.discarded == 0


@pytest.mark.parametrize("window", [1, 6, 16])
def test_the_cache_s_end_is_reached_and_not_passed(model, window):
    prompt = (PROMPT * 30)[: model.max_length - 2]
    result = model.generate(prompt, speculation={"proposer": "self", "window": window, "fallback": False})
    assert list(result.ids) == greedy_reference(TARGET, prompt, 2)
    assert result.finish_reason == "length"
    model.bundle.arena.check_guards()


def test_without_a_limit_the_visible_length_is_filled(model, speculation):
    result = model.generate(PROMPT, speculation=speculation)
    assert len(PROMPT) + len(result.ids) == model.max_length == 64


def test_a_prompt_that_does_not_fit_names_both_numbers(model):
    with pytest.raises(GenerationError, match="at most 63 tokens leave room for an answer in 64, got 64"):
        model.generate([1] * 64)
    with pytest.raises(GenerationError, match=r"at most 63.*got 1000"):
        model.generate([1] * 1000)


def test_max_length_may_be_lowered_at_load(tmp_path):
    path = toy_bundle(tmp_path / "toy.dsmodel", TARGET)
    assert len(load(path, verify="never", max_length=20).generate(PROMPT).ids) == 17
    with pytest.raises(RequestError, match=r"at most 64 is allowed, got 65 \(the bundle was compiled for 64"):
        load(path, verify="never", max_length=65)


def test_a_draft_with_a_shorter_context_stops_drafting(tmp_path):
    path = toy_bundle(tmp_path / "toy.dsmodel", TARGET, TARGET, draft_max_length=20)
    result = load(path, verify="never").generate(PROMPT, speculation={"window": 4, "fallback": False})
    assert list(result.ids) == greedy_reference(TARGET, PROMPT, 61)
    assert result.stats.accepted > 0
    assert result.stats.fallbacks["draft context full"] > 30


# --- the draft's own state


def test_a_draft_that_paused_catches_up(model):
    tokens = list(PROMPT)
    for index, (speculation, n) in enumerate([(SELF, 7), ("off", 9), (SELF, 8), ("off", 1), (SELF, 9)]):
        stream = model.stream(tokens, n, speculation=speculation, reuse_cache=index > 0)
        result = stream.finish()
        tokens += result.ids
        assert result.stats.accepted == result.stats.evaluated
    assert tokens == PROMPT + PLAIN[: len(tokens) - 3]


def test_a_forced_cool_down_does_not_spoil_the_draft(tmp_path):
    """A draft that is mostly wrong is put aside, and the output stays the target's."""
    path = toy_bundle(tmp_path / "toy.dsmodel", TARGET, -TARGET, max_length=512)
    result = load(path, verify="never").generate(PROMPT, 400)
    assert list(result.ids) == greedy_reference(TARGET, PROMPT, 400)
    put_aside = ("cool-down", "reading not covered", "reading does not pay")
    assert sum(result.stats.fallbacks[reason] for reason in put_aside) > 300
    assert result.stats.fallbacks["cool-down"] > 0
    assert result.stats.proposed > 0


# --- caches and turns


def test_a_second_turn_is_a_fresh_run_on_all_ids(model, speculation):
    first = model.generate(PROMPT, 9, speculation=speculation)
    ids = [*PROMPT, *first.ids, 7, 7, 2]
    again = model.stream(ids, 12, speculation=speculation, reuse_cache=True).finish()
    assert again.stats.cached_tokens == len(PROMPT) + 9 - 1
    assert list(again.ids) == greedy_reference(TARGET, ids, 12)


def test_another_generation_in_between_changes_nothing(model, speculation):
    first = model.generate(PROMPT, 9, speculation=speculation)
    model.generate([9, 9, 9, 9], 20, speculation=speculation)
    ids = [*PROMPT, *first.ids, 5]
    again = model.stream(ids, 12, speculation=speculation, reuse_cache=True).finish()
    assert list(again.ids) == greedy_reference(TARGET, ids, 12)


def test_reset_gives_a_model_as_after_loading(model):
    first = model.generate(PROMPT, 20)
    model.reset()
    again = model.generate(PROMPT, 20)
    counters = [(s.proposed, s.accepted, s.rounds, s.cached_tokens) for s in (first.stats, again.stats)]
    assert first.ids == again.ids
    assert counters[0] == counters[1]


def test_rewinding_is_a_shorter_prompt(model, speculation):
    model.generate(PROMPT, 30, speculation=speculation)
    ids = [*PROMPT, *PLAIN[:10]]
    result = model.stream(ids, 20, speculation=speculation, reuse_cache=True).finish()
    assert result.stats.cached_tokens == len(ids) - 1
    assert list(result.ids) == PLAIN[10:30]


def test_two_models_of_one_bundle_do_not_share_state(tmp_path):
    path = toy_bundle(tmp_path / "toy.dsmodel", TARGET, DRAFT)
    one, two = load(path, verify="never"), load(path, verify="never")
    a, b = one.stream(PROMPT, 30), two.stream([8, 8], 30)
    for _ in range(5):
        next(a)
        next(b)
    assert list(a.finish().ids) == PLAIN[:30]
    assert list(b.finish().ids) == greedy_reference(TARGET, [8, 8], 30)
