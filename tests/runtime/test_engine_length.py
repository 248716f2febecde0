import numpy as np
import pytest
from forward_graphs import VOCAB
from packed_bundle import packed_bundle

from dsc.bundle_schema.errors import GenerationError, PlanError
from dsc.kernels.native import find_library
from dsc.runtime import load

PROMPTS = [np.random.default_rng(seed).integers(0, VOCAB, 20 + 5 * seed).tolist() for seed in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    library = find_library()
    if library.path is None:
        pytest.skip(library.reason)
    return load(packed_bundle(tmp_path_factory.mktemp("engine") / "tiny.dsmodel"), kernels="native")


def test_a_smaller_length_cuts_no_request_that_was_accepted(model):
    plain = [model.generate(prompt, 120).ids for prompt in PROMPTS]
    engine = model.engine(slots=2, background=False)
    tickets = [engine.submit(prompt, max_new_tokens=120) for prompt in PROMPTS]
    for _ in range(10):
        engine.step()
    engine.resize(64)
    with pytest.raises(GenerationError, match="at most 63 tokens leave room"):
        engine.submit(list(range(64)), max_new_tokens=5)
    late = engine.submit(PROMPTS[0], max_new_tokens=120)
    engine.run()
    assert [ticket.result().ids for ticket in tickets] == plain
    assert late.result().ids == plain[0][: 64 - len(PROMPTS[0])]
    assert late.result().finish_reason == "length"
    stats = engine.stats()
    assert (stats["max_length"], stats["cache"]["resized"], stats["failed"]) == (64, 1, 0)


def test_a_larger_length_holds_when_its_memory_is_there(model):
    engine = model.engine(slots=2, background=False)
    engine.resize(40)
    assert engine.stats()["max_length"] == 40
    engine.resize(200)
    assert engine.stats()["max_length"] == 200
    result = engine.submit(PROMPTS[5], max_new_tokens=150).result()
    assert result.ids == model.generate(PROMPTS[5], 150).ids


def test_the_length_changes_under_a_running_thread(model):
    plain = [model.generate(prompt, 60).ids for prompt in PROMPTS]
    with model.engine(slots=3) as engine:
        tickets = []
        for index, prompt in enumerate(PROMPTS * 2):
            tickets.append(engine.submit(prompt, max_new_tokens=60))
            engine.resize(200 if index % 3 else 120)
        assert [ticket.result().ids for ticket in tickets] == plain * 2
        engine.drain()
        assert engine.stats()["failed"] == 0


def test_an_idle_engine_with_a_thread_follows_too(model):
    with model.engine(slots=2) as engine:
        for length in (50, 170):
            engine.resize(length)
            with engine._changed:
                engine._changed.wait_for(lambda length=length: engine.stats()["max_length"] == length)
            assert engine.stats()["max_length"] == length


def test_a_length_beyond_the_bundle_is_refused(model):
    engine = model.engine(slots=2, background=False)
    with pytest.raises(PlanError, match="1 to 200 are possible in this bundle, got 201"):
        engine.resize(201)
    assert engine.stats()["max_length"] == 200
