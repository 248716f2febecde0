"""Streams, threads, async loops and interrupts: the model stays usable, whoever leaves when."""

import asyncio
import gc
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from scripted_lm import greedy_reference
from scripted_text import PLAIN, PROMPT, TARGET, VOCAB
from toy_bundle import toy_bundle

from dsc.bundle_schema.errors import GenerationError
from dsc.runtime.stream import GenerationStream


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


def test_an_interruption_between_two_chunks_lets_the_model_go_at_once(model, monkeypatch):
    """Without waiting for the garbage collector, which a stream that holds itself would need."""
    following = GenerationStream.__next__
    moments = iter([False, False, True])

    def interrupted(stream):
        if next(moments, False):
            raise KeyboardInterrupt
        return following(stream)

    monkeypatch.setattr(GenerationStream, "__next__", interrupted)
    gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt):
            model.generate(PROMPT, 30)
        assert list(model.generate(PROMPT, 30).ids) == PLAIN[:30]
    finally:
        gc.enable()


def test_a_signal_in_the_middle_of_a_generation_leaves_the_model_usable(tmp_path):
    """A real signal at some moment of long generations, several times, in a process of its own."""
    path = toy_bundle(tmp_path / "toy.dsmodel", TARGET, TARGET, draft_kind="self", max_length=1000)
    script = Path(__file__).parents[1] / "support" / "interrupted_generation.py"
    command = [sys.executable, "-P", script, path, json.dumps(PROMPT), json.dumps(PLAIN)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted 4 times\n", "")
