"""Ends, limits, turns, errors: the edges of a generation."""

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from scripted_lm import greedy_reference
from toy_bundle import toy_bundle

from dsc.bundle_schema.errors import GenerationError, RequestError
from dsc.runtime import load

VOCAB = 13
RNG = np.random.default_rng(11)
TARGET = RNG.normal(size=(VOCAB, VOCAB)).astype(np.float32)
DRAFT = TARGET + 0.3 * RNG.normal(size=TARGET.shape).astype(np.float32)
PROMPT = [3, 1, 4]
PLAIN = greedy_reference(TARGET, PROMPT, 50)
SELF = {"proposer": "self", "window": 5, "fallback": False}
OPTIONS = ["off", "auto", SELF, {"proposer": "ngram", "window": 4, "fallback": False}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "toy.dsmodel"
    return load(toy_bundle(path, TARGET, TARGET, draft_kind="self"), verify="never")


@pytest.fixture(params=OPTIONS, ids=["off", "auto", "self", "ngram"])
def speculation(request):
    return request.param


def first_index(token: int) -> int:
    return PLAIN.index(token)


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
    assert result.stats.fallbacks["cool-down"] > 300
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


# --- hooks


def ban(*tokens: int):
    def hook(logits, history, drafts):
        logits[:, list(tokens)] = -np.inf

    return hook


def test_banned_tokens_stay_banned_in_blocks(model, speculation):
    banned = PLAIN[3]
    table = TARGET.copy()
    table[:, banned] = -np.inf
    result = model.generate(PROMPT, 30, speculation=speculation, processors=[ban(banned)])
    assert list(result.ids) == greedy_reference(table, PROMPT, 30)


def test_a_processor_sees_each_row_s_exact_history(model, speculation):
    def check(logits, history, drafts):
        assert len(logits) == len(drafts) + 1
        for i, row in enumerate(logits):
            seen = [*history, *drafts[:i]]
            earlier = sum((position % 7 + 1) * token for position, token in enumerate(seen[:-1]))
            np.testing.assert_array_equal(row, TARGET[(seen[-1] + earlier) % VOCAB])

    model.generate(PROMPT, 30, speculation=speculation, processors=[check])


def test_a_processor_is_not_asked_after_the_end(model):
    stop = PLAIN[6]

    def strict(logits, history, drafts):
        assert stop not in [*history[len(PROMPT) :], *drafts]

    for speculation in OPTIONS:
        result = model.generate(PROMPT, 50, stop_tokens=[stop], processors=[strict], speculation=speculation)
        assert list(result.ids) == PLAIN[: first_index(stop) + 1]


def test_an_exception_in_a_processor_leaves_the_model_usable(model, speculation):
    def fail(logits, history, drafts):
        if len(history) > 9:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        model.generate(PROMPT, 30, speculation=speculation, processors=[fail])
    ids = [*PROMPT, *PLAIN[:3]]
    result = model.stream(ids, 20, speculation=speculation, reuse_cache=True).finish()
    assert list(result.ids) == PLAIN[3:23]
    assert list(model.generate(PROMPT, 30, speculation=speculation).ids) == PLAIN[:30]


def test_when_everything_is_banned_the_error_says_so(model):
    with pytest.raises(GenerationError, match="a token with a finite logit is required, got -inf"):
        model.generate(PROMPT, 3, processors=[ban(*range(VOCAB))])


# --- streams and threads


def test_a_stream_is_the_result_in_pieces(model, speculation):
    stream = model.stream(PROMPT, 30, speculation=speculation)
    ids = [token for chunk in stream for token in chunk.ids]
    assert ids == PLAIN[:30] == list(stream.result.ids)


def test_a_closed_stream_lets_the_model_go(model):
    with model.stream(PROMPT, 30) as stream:
        next(stream)
    assert stream.result is None
    assert list(model.generate(PROMPT, 30).ids) == PLAIN[:30]


def test_generating_inside_an_open_stream_is_refused(model):
    stream = model.stream(PROMPT, 30)
    next(stream)
    with pytest.raises(GenerationError, match="this thread or task has an open stream"):
        model.generate(PROMPT, 5)
    assert list(stream.finish().ids) == PLAIN[:30]


def test_threads_take_turns(model):
    prompts = [[i, 2, 5] for i in range(8)]
    results: dict[int, list[int]] = {}

    def work(index: int) -> None:
        results[index] = list(model.generate(prompts[index], 30).ids)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: greedy_reference(TARGET, prompts[i], 30) for i in range(8)}


def test_async_generation_and_streaming(model):
    async def run():
        results = await asyncio.gather(*(model.agenerate([i, 1], max_new_tokens=10) for i in range(3)))
        chunks = [chunk async for chunk in model.astream(PROMPT, max_new_tokens=20)]
        return [list(result.ids) for result in results], [token for chunk in chunks for token in chunk.ids]

    results, streamed = asyncio.run(run())
    assert results == [greedy_reference(TARGET, [i, 1], 10) for i in range(3)]
    assert streamed == PLAIN[:20]


def test_many_waiting_calls_do_not_stop_an_async_stream(model):
    async def run():
        chunks = model.astream(PROMPT, max_new_tokens=40)
        ids = list((await anext(chunks)).ids)
        waiting = [asyncio.ensure_future(model.agenerate([i % VOCAB], max_new_tokens=3)) for i in range(100)]
        await asyncio.sleep(0.01)
        ids += [token async for chunk in chunks for token in chunk.ids]
        await asyncio.gather(*waiting)
        return ids

    assert asyncio.run(asyncio.wait_for(run(), 60)) == PLAIN[:40]


def test_an_abandoned_async_stream_lets_the_model_go(model):
    async def run():
        chunks = model.astream(PROMPT, max_new_tokens=60)
        await anext(chunks)
        await chunks.aclose()

    asyncio.run(run())
    assert list(model.generate(PROMPT, 5).ids) == PLAIN[:5]


def test_generating_inside_an_open_async_stream_is_refused_and_not_waited_for(model):
    async def run():
        ids: list[int] = []
        async for chunk in model.astream(PROMPT, max_new_tokens=20):
            ids += chunk.ids
            with pytest.raises(GenerationError, match="this thread or task has an open stream"):
                await model.agenerate(PROMPT, max_new_tokens=3)
            with pytest.raises(GenerationError, match="this thread or task has an open stream"):
                model.generate(PROMPT, 3)
            with pytest.raises(GenerationError, match="this thread or task has an open stream"):
                await anext(model.astream(PROMPT, max_new_tokens=3))
        return ids, list((await model.agenerate(PROMPT, max_new_tokens=5)).ids)

    assert asyncio.run(asyncio.wait_for(run(), 60)) == (PLAIN[:20], PLAIN[:5])


def test_an_async_loop_may_be_left_and_two_streams_wait_for_each_other(model):
    async def collect(chunks):
        return [token async for chunk in chunks for token in chunk.ids]

    async def run():
        async for _ in model.astream(PROMPT, max_new_tokens=60):
            break
        after = list((await model.agenerate(PROMPT, max_new_tokens=5)).ids)
        streams = [model.astream([i, 1], max_new_tokens=8) for i in range(3)]
        return after, await asyncio.gather(*map(collect, streams))

    after, streamed = asyncio.run(asyncio.wait_for(run(), 60))
    assert after == PLAIN[:5]
    assert streamed == [greedy_reference(TARGET, [i, 1], 8) for i in range(3)]


@pytest.mark.parametrize("at", [1, 4])
def test_an_interrupt_in_the_middle_leaves_the_model_usable(model, speculation, at):
    """Ctrl-C can fall between any two steps; here it falls before the verdict of a round."""
    calls = []

    def interrupt(logits, history, drafts):
        calls.append(len(history))
        if len(calls) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(PROMPT, 30, speculation=speculation, processors=[interrupt])
    result = model.stream([*PROMPT, *PLAIN[:2]], 20, speculation=speculation, reuse_cache=True).finish()
    assert list(result.ids) == PLAIN[2:22]


def test_an_interrupted_loop_over_a_stream_ends_with_its_block(model):
    stream = model.stream(PROMPT, 30)

    def loop():
        with stream:
            for _ in stream:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert list(model.generate(PROMPT, 30).ids) == PLAIN[:30]
    assert list(stream) == []


def test_a_signal_in_the_middle_of_a_generation_leaves_the_model_usable(tmp_path):
    """A real SIGINT at some moment of long generations, several times, in a process of its own."""
    path = toy_bundle(tmp_path / "toy.dsmodel", TARGET, TARGET, draft_kind="self", max_length=1000)
    script = Path(__file__).parents[1] / "support" / "interrupted_generation.py"
    command = [sys.executable, "-P", script, path, json.dumps(PROMPT), json.dumps(PLAIN)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted 4 times\n", "")


# --- bad requests


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: at least 1 is required, got 0"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens: a whole number is required, got 2\.5"),
        ({"max_new_tokens": NAN}, "max_new_tokens: a whole number is required, got nan"),
        ({"max_new_tokens": "3"}, "max_new_tokens: a whole number is required, got '3'"),
        ({"max_new_tokens": True}, "max_new_tokens: a whole number is required, got True"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature: .*got -1"),
        ({"sampling": {"temperature": NAN}}, "sampling.temperature: .*got nan"),
        ({"sampling": {"top_k": -1}}, "sampling.top_k: .*got -1"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p: .*got 0"),
        ({"sampling": {"heat": 1}}, "sampling.heat: "),
        ({"sampling": {1: 2}}, "sampling.1: "),
        ({"sampling": "greedy"}, "sampling: SamplingParams or a mapping .*got 'greedy'"),
        ({"sampling": {"logit_bias": {99: 1.0}}}, "token ids below 13 are required, got 99"),
        ({"sampling": {"logit_bias": {1: INF}}}, "sampling.logit_bias.1: .*got inf"),
        ({"sampling": {"logit_bias": {1: 1e39}}}, "sampling.logit_bias.1: "),
        ({"sampling": {"repetition_penalty": 1e-40}}, "sampling.repetition_penalty: "),
        ({"seed": -1}, "sampling.seed: .*got -1"),
        ({"seed": "x"}, "sampling.seed: .*got 'x'"),
        ({"speculation": "fast"}, "speculation: 'auto', 'off' or options are required, got 'fast'"),
        ({"speculation": None}, "speculation: .*got None"),
        ({"speculation": np.zeros(3)}, "speculation: .*got array"),
        ({"speculation": {"window": 17}}, "speculation.window: "),
        ({"speculation": {"window": NAN}}, "speculation.window: "),
        ({"speculation": {"wndow": 4}}, "speculation.wndow: "),
        ({"speculation": {1: 4}}, "speculation.1: "),
        ({"speculation": {"proposer": "eagle3"}}, "one of ngram, self is required, got 'eagle3'"),
        ({"stop": "x"}, "stop strings need a tokenizer"),
        ({"stop": [5]}, "stop: texts are required, got 5 .stop_tokens takes ids"),
        ({"stop": None}, "stop: a text or a sequence of texts is required, got None"),
        ({"stop": [""]}, "stop: texts of at least one character are required"),
        ({"stop_tokens": 5}, "stop_tokens: a sequence of token ids is required, got 5"),
        ({"stop_tokens": [1.5]}, r"stop_tokens token 0: a whole number is required, got 1\.5"),
        ({"stop_tokens": [10**30]}, "stop_tokens: ids below 13 are required, got 1000"),
        ({"processors": print}, "processors: a sequence of functions is required, got <built-in"),
        ({"processors": [5]}, "processors: functions are required, got 5"),
    ],
)
def test_a_wrong_argument_is_named(model, options, message):
    with pytest.raises(RequestError, match=message):
        model.generate(PROMPT, **options)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: at least one token"),
        ([1, 13], "prompt token 1: an id below 13 is required, got 13"),
        ([-1], "prompt token 0"),
        ([10**30], "prompt token 0"),
        ([1, 1.5], r"prompt token 1: a whole number is required, got 1\.5"),
        ([1, NAN], "prompt token 1: a whole number is required, got nan"),
        (["1"], "prompt token 0: a whole number is required, got '1'"),
        (np.array([[1, 2]]), "prompt token 0: a whole number is required, got array"),
        (None, "prompt: a sequence of token ids is required, got None"),
        (b"ab", "prompt: a sequence of token ids is required, got b'ab'"),
        ({"role": "user", "content": "x"}, "prompt: messages come in a list"),
        ([{"role": "user", "content": "x"}, 3], "prompt message 1: a mapping with a role is required, got 3"),
        ([{"content": "x"}], "prompt message 0: a mapping with a role"),
    ],
)
def test_a_wrong_prompt_is_named(model, prompt, message):
    with pytest.raises((GenerationError, RequestError), match=message):
        model.generate(prompt)
    assert list(model.generate(PROMPT, 5).ids) == PLAIN[:5]


@pytest.mark.parametrize("prompt", [np.array([3, 1, 4]), (3, 1, 4), (token for token in PROMPT), np.int32([3, 1, 4])])
def test_ids_come_in_any_sequence(model, prompt):
    assert list(model.generate(prompt, np.int64(5)).ids) == PLAIN[:5]


def test_text_without_a_tokenizer_is_refused(model):
    with pytest.raises(RequestError, match="text needs a tokenizer"):
        model.generate("hello")
