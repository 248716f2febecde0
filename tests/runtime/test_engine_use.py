"""An engine's readers, in threads and tasks, what it refuses, and how it closes."""

from __future__ import annotations

import asyncio
from threading import Thread

import numpy as np
import pytest
from forward_graphs import VOCAB
from packed_bundle import packed_bundle

from dsc.bundle_schema.errors import GenerationError, RequestError
from dsc.kernels.native import find_library
from dsc.runtime import load

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(0, VOCAB, size).tolist() for size in (1, 3, 9, 40, 90, 17)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    if find_library().path is None:
        pytest.skip(find_library().reason)
    return load(packed_bundle(tmp_path_factory.mktemp("engine") / "tiny.dsmodel"), kernels="native")


def single(model, prompt, options):
    return model.generate(prompt, **options).ids


@pytest.mark.parametrize(
    ("options", "message"),
    [({"slots": 0}, "slots"), ({"max_waiting": 0}, "max_waiting"), ({"prefill_stretch": 0.5}, "prefill_stretch")]
    + [({"prefill_stretch": wrong}, "at least 1 is required") for wrong in (float("nan"), "x", None)]
    + [({"slots": wrong}, "slots: ") for wrong in (1.5, True, "2", 10**6, None)]
    + [({"background": "no"}, "background: True or False is required")],
)
def test_wrong_engines_are_refused(packed, options, message):
    with pytest.raises(RequestError, match=message):
        packed.engine(**options)


def test_wrong_requests_are_refused_before_they_wait(packed):
    engine = packed.engine(background=False)
    for length in (64.5, "x", None, True, 0):
        with pytest.raises(RequestError, match="max_length"):
            engine.resize(length)
    for wrong in (
        {"time_limit": 0},
        {"time_limit": "x"},
        {"tenant": 3},
        {"speculation": {"proposer": "nobody"}},
        {"max_new_tokens": 0},
    ):
        with pytest.raises(RequestError):
            engine.submit(PROMPTS[0], **wrong)
    assert engine.stats()["submitted"] == engine.stats()["waiting"] == 0


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_a_closed_engine_closes_again_and_takes_nothing_more(packed, background, used):
    engine = packed.engine(background=background)
    tickets = [engine.submit(PROMPTS[0], max_new_tokens=2)] if used else []
    engine.close()
    for _ in range(2):
        engine.close()
        engine.drain()
        engine.run()
        assert not engine.step()
    for call in (lambda: engine.submit(PROMPTS[0]), lambda: engine.resize(64)):
        with pytest.raises(GenerationError, match="engine: is closed"):
            call()
    assert all(ticket.done for ticket in tickets)
    assert engine.stats()["submitted"] == len(tickets)
    with engine:
        pass


def test_chunks_reach_threads_and_tasks(packed):
    wanted = [single(packed, prompt, {"max_new_tokens": 15}) for prompt in PROMPTS]
    found = {}

    def read(index, ticket):
        found[index] = tuple(token for chunk in ticket for token in chunk.ids)

    async def main(engine):
        async def read_one(ticket):
            return tuple([token async for chunk in ticket for token in chunk.ids])

        return await asyncio.gather(*(read_one(engine.submit(prompt, max_new_tokens=15)) for prompt in PROMPTS))

    with packed.engine(slots=3) as engine:
        threads = [Thread(target=read, args=(i, engine.submit(p, max_new_tokens=15))) for i, p in enumerate(PROMPTS)]
        for thread in threads:
            thread.start()
        assert asyncio.run(main(engine)) == wanted
        for thread in threads:
            thread.join()
    assert [found[index] for index in range(len(PROMPTS))] == wanted


def test_threads_that_wait_run_the_rounds_where_no_thread_does(packed):
    wanted = [single(packed, prompt, {"max_new_tokens": 15}) for prompt in PROMPTS]
    engine = packed.engine(slots=2, background=False)
    tickets = [engine.submit(prompt, max_new_tokens=15) for prompt in PROMPTS]
    threads = [Thread(target=ticket.result) for ticket in tickets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ticket.result().ids for ticket in tickets] == wanted


def test_a_reader_whose_event_loop_has_closed_disturbs_nobody(packed):
    async def read_one_chunk(ticket):
        chunks = aiter(ticket)
        loops.append(chunks)  # kept: nothing closes it
        return await anext(chunks)

    loops = []
    wanted = single(packed, PROMPTS[3], {"max_new_tokens": 40})
    engine = packed.engine(slots=1, background=False)
    ticket = engine.submit(PROMPTS[3], max_new_tokens=40)
    while not ticket.stats.rounds:
        engine.step()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(read_one_chunk(ticket))
    loop.close()
    assert ticket.result().ids == wanted


def test_closing_cancels_what_runs_and_what_waits(packed):
    engine = packed.engine(slots=1)

    def hold(logits, tokens, drafts):
        """From the second round on, nothing goes on before the engine is closed."""
        if len(tokens) > len(PROMPTS[3]):
            with engine._changed:
                engine._changed.wait_for(lambda: engine._closed)

    options = {"max_new_tokens": 150, "speculation": "off"}
    running = engine.submit(PROMPTS[3], processors=[hold], **options)
    waiting = engine.submit(PROMPTS[3], **options)
    next(iter(running))
    engine.close()
    assert running.result().finish_reason == "cancelled"
    with pytest.raises(GenerationError, match="before it had a slot"):
        waiting.result()


def test_a_request_that_gets_its_slot_while_the_engine_closes_is_cancelled(packed, monkeypatch):
    engine = packed.engine(background=False)
    ticket = engine.submit(PROMPTS[0], max_new_tokens=50, speculation="off")
    join = engine._rounds.join

    def close_meanwhile(*entry):
        engine._closed = True  # what `close` does between the line and the slot
        join(*entry)

    monkeypatch.setattr(engine._rounds, "join", close_meanwhile)
    engine.run()
    assert ticket.result().finish_reason == "cancelled"
    assert len(ticket.result().ids) <= 1
