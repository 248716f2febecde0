"""An engine of many sequences: each has the output of its single run, whatever the others do."""

from __future__ import annotations

import random

import numpy as np
import pytest
from forward_graphs import VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_bundle import packed_bundle
from toy_bundle import toy_bundle

from dsc.bundle_schema.dflash_config import DflashConfig, Proposer
from dsc.bundle_schema.errors import GenerationError, RequestError
from dsc.kernels.native import find_library
from dsc.runtime import load
from dsc.runtime.session import ForwardSession

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(0, VOCAB, size).tolist() for size in (1, 3, 9, 40, 90, 17)]
PROMPTS += [[5, 6, 7, 8] * 6]  # something for a lookup
OPTIONS = [
    {"max_new_tokens": 20},
    {"max_new_tokens": 33, "speculation": "off"},
    {"max_new_tokens": 9, "speculation": {"window": 4, "fallback": False}},
    {"max_new_tokens": 25, "sampling": {"temperature": 0.9, "top_p": 0.9}, "seed": 3},
    {"max_new_tokens": 12, "sampling": {"repetition_penalty": 1.3}, "stop_tokens": [11, 40]},
    {"max_new_tokens": 1},
]


def require_native():
    if find_library().path is None:
        pytest.skip(find_library().reason)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return packed_bundle(tmp_path_factory.mktemp("engine") / "tiny.dsmodel")


@pytest.fixture(scope="module", params=["native", "ort"])
def model(request, path):
    if request.param == "native":
        require_native()
    return load(path, kernels=request.param)


@pytest.fixture(scope="module")
def packed(path):
    require_native()
    return load(path, kernels="native")


def requests():
    return [(prompt, options) for prompt in PROMPTS for options in OPTIONS]


def single(model, prompt, options):
    return model.generate(prompt, **options).ids


def test_every_output_is_that_of_a_single_run(model):
    wanted = [single(model, prompt, options) for prompt, options in requests()]
    with model.engine(slots=3) as engine:
        tickets = [engine.submit(prompt, **options) for prompt, options in requests()]
        assert [ticket.result().ids for ticket in tickets] == wanted
        stats = engine.stats()
    assert stats["finished"] == len(wanted)
    assert stats["most_sequences"] == 3
    if model.bundle.settings.kernels == "native":
        assert stats["forwards"] == stats["rounds"]
        assert tickets[0].stats.sharing == "packed rows"
    else:
        assert stats["forwards"] > stats["rounds"]
        assert "only the native kernels" in stats["forward"] == tickets[0].stats.sharing


@pytest.mark.parametrize("policy", ["batched", "calibrated", "rules", "fixed"])
def test_every_policy_keeps_the_outputs(path, policy):
    require_native()
    model = load(path, kernels="native")
    model.update_config({"policy": policy, "batched.max_rows": 8})
    wanted = [single(model, prompt, options) for prompt, options in requests()]
    with model.engine(slots=4) as engine:
        tickets = [engine.submit(prompt, **options) for prompt, options in requests()]
    assert [ticket.result().ids for ticket in tickets] == wanted
    assert sum(ticket.stats.accepted for ticket in tickets) > 0


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_each_sequence_has_a_draft_of_its_own(tmp_path, kind):
    table = np.random.default_rng(5).normal(size=(53, 50)).astype(np.float32)
    drafts = np.where(np.random.default_rng(6).random((53, 1)) < 0.7, table, -table)
    config = DflashConfig(policy="calibrated", proposers={"model": Proposer(), "ngram": Proposer()})
    model = load(toy_bundle(tmp_path / "toy.dsmodel", table, drafts, max_length=120, config=config))
    prompts = [[7 * i + 1, i, 3] for i in range(7)]
    speculation = {"proposer": kind, "window": 4, "fallback": False}
    wanted = [single(model, ids, {"max_new_tokens": 40, "speculation": "off"}) for ids in prompts]
    with model.engine(slots=3) as engine:
        tickets = [engine.submit(ids, max_new_tokens=40, speculation=speculation) for ids in prompts]
    assert [ticket.result().ids for ticket in tickets] == wanted
    assert any(kind in ticket.stats.proposers for ticket in tickets)
    assert kind == "ngram" or all(ticket.stats.proposers[kind].accepted for ticket in tickets)


class FaultError(Exception):
    """Raised by a processor."""


def faulty(after):
    def processor(logits, tokens, drafts):
        if len(tokens) > after:
            raise FaultError

    return processor


@given(data=st.data())
@settings(max_examples=12)
def test_requests_come_go_and_fail_in_any_order(packed, data):
    choices = requests()
    engine = packed.engine(slots=data.draw(st.integers(1, 4)), background=False, prefill_stretch=1.0)
    going = []
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["submit", "submit", "round", "round", "cancel", "fault"])):
            case "submit":
                prompt, options = choices[data.draw(st.integers(0, len(choices) - 1))]
                going.append((engine.submit(prompt, **options), prompt, options))
            case "fault":
                prompt, _ = choices[data.draw(st.integers(0, len(choices) - 1))]
                options = {"max_new_tokens": 30, "processors": [faulty(len(prompt) + data.draw(st.integers(0, 8)))]}
                going.append((engine.submit(prompt, **options), prompt, None))
            case "round":
                engine.step()
            case "cancel" if going:
                going[data.draw(st.integers(0, len(going) - 1))][0].cancel()
    engine.run()
    for ticket, prompt, options in going:
        check(packed, ticket, prompt, options)
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == stats["cache"]["allocated"] - stats["cache"]["freed"] == 0
    ends = ("finished", "cancelled", "out_of_time", "failed")
    assert sum(stats[name] for name in ends) == stats["submitted"] == len(going)


def check(model, ticket, prompt, options):
    """The single run's output; a part of it when cancelled; the error of a request that failed."""
    assert ticket.done
    try:
        result = ticket.result()
    except FaultError:
        assert options is None
        return
    except GenerationError:
        assert ticket.cancelled
        return
    wanted = single(model, prompt, options or {"max_new_tokens": 30})
    assert result.ids == tuple(token for chunk in ticket for token in chunk.ids)
    if result.finish_reason == "cancelled":
        assert result.ids == wanted[: len(result.ids)]
    else:
        assert options is not None
        assert result.ids == wanted


def test_a_shared_forward_that_fails_is_tried_again_one_by_one(packed, monkeypatch):
    wanted = [single(packed, prompt, {"max_new_tokens": 8}) for prompt in PROMPTS[:3]]

    def fail(self, sequences):
        raise GenerationError("graph", "no memory")

    monkeypatch.setattr(ForwardSession, "forward_packed", fail)
    engine = packed.engine(slots=3, background=False)
    tickets = [engine.submit(prompt, max_new_tokens=8) for prompt in PROMPTS[:3]]
    engine.run()
    assert [ticket.result().ids for ticket in tickets] == wanted
    assert engine.stats()["split_rounds"] > 0


def test_an_error_of_one_forward_ends_only_its_request(packed, monkeypatch):
    whole = ForwardSession.forward
    monkeypatch.setattr(ForwardSession, "forward_packed", lambda *_: (_ for _ in ()).throw(GenerationError("g", "x")))

    def fail_for_one(self, tokens, past, n_logits):
        if past >= len(PROMPTS[2]) and past < len(PROMPTS[3]):
            raise GenerationError("graph", "these rows are bad")
        return whole(self, tokens, past, n_logits)

    wanted = single(packed, PROMPTS[3], {"max_new_tokens": 5, "speculation": "off"})
    monkeypatch.setattr(ForwardSession, "forward", fail_for_one)
    engine = packed.engine(slots=2, background=False)
    bad, good = (engine.submit(PROMPTS[i], max_new_tokens=5, speculation="off") for i in (2, 3))
    engine.run()
    with pytest.raises(GenerationError, match="these rows are bad"):
        bad.result()
    assert good.result().ids == wanted


def test_a_bundle_without_packed_rows_says_so(tmp_path):
    require_native()
    model = load(packed_bundle(tmp_path / "old.dsmodel", packed=False), kernels="native")
    with model.engine(slots=2) as engine:
        tickets = [engine.submit(prompt, max_new_tokens=6) for prompt in PROMPTS[:3]]
        found = [ticket.result().ids for ticket in tickets]
    assert found == [single(model, prompt, {"max_new_tokens": 6}) for prompt in PROMPTS[:3]]
    assert "compile it again" in engine.stats()["forward"]


def test_a_trace_that_runs_out_of_room_ends_only_its_request(packed):
    wanted = single(packed, PROMPTS[3], {"max_new_tokens": 9})
    engine = packed.engine(slots=2, background=False)
    bad = [engine.submit(PROMPTS[2], max_new_tokens=n, trace="/dev/full", stop_tokens=[]) for n in (2, 120)]
    good = engine.submit(PROMPTS[3], max_new_tokens=9)
    engine.run()
    for ticket in bad:
        with pytest.raises(RequestError, match="/dev/full: the trace cannot be written: No space left"):
            ticket.result()
    assert good.result().ids == wanted
    assert (engine.stats()["failed"], engine.stats()["running"]) == (2, 0)


def test_time_limits_end_requests_with_what_they_have(packed):
    now = [0.0]
    engine = packed.engine(slots=1, background=False, clock=lambda: now[0])
    first = engine.submit(PROMPTS[1], max_new_tokens=50, time_limit=5, speculation="off")
    second = engine.submit(PROMPTS[2], max_new_tokens=50, time_limit=1)
    third = engine.submit(PROMPTS[2], max_new_tokens=5)
    for _ in range(4):
        engine.step()
    now[0] = 6.0
    engine.run()
    assert first.result().finish_reason == "time"
    assert first.result().ids == single(packed, PROMPTS[1], {"max_new_tokens": 50})[: len(first.result().ids)] != ()
    with pytest.raises(GenerationError, match="ran out of time before it had a slot"):
        second.result()
    assert third.result().ids == single(packed, PROMPTS[2], {"max_new_tokens": 5})


def test_tenants_take_turns_and_too_many_requests_are_refused(packed):
    engine = packed.engine(slots=1, background=False, max_waiting=5)
    many = [engine.submit(PROMPTS[0], max_new_tokens=2, tenant="a") for _ in range(4)]
    few = engine.submit(PROMPTS[0], max_new_tokens=2, tenant="b")
    with pytest.raises(GenerationError, match="5 requests wait already"):
        engine.submit(PROMPTS[0])
    while not few.done:
        engine.step()
    assert [ticket.done for ticket in many] == [True, False, False, False]
    engine.close()
    with pytest.raises(GenerationError, match="is closed"):
        engine.submit(PROMPTS[0])


def test_the_model_itself_stays_usable(packed):
    wanted = single(packed, PROMPTS[4], {"max_new_tokens": 20})
    with packed.engine(slots=2) as engine:
        tickets = [engine.submit(PROMPTS[4], max_new_tokens=20) for _ in range(4)]
        assert single(packed, PROMPTS[4], {"max_new_tokens": 20}) == wanted
        assert [ticket.result().ids for ticket in tickets] == [wanted] * 4


def test_a_shuffled_crowd(packed):
    crowd = requests() * 2
    random.Random(3).shuffle(crowd)
    wanted = {}
    with packed.engine(slots=7) as engine:
        tickets = [(engine.submit(prompt, **options), prompt, options) for prompt, options in crowd]
    for ticket, prompt, options in tickets:
        key = (tuple(prompt), str(options))
        wanted.setdefault(key, single(packed, prompt, options))
        assert ticket.result().ids == wanted[key]
