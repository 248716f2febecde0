"""A draft over the target's own cache: whatever it writes there, the output is the target's."""

from __future__ import annotations

import numpy as np
import pytest
from forward_graphs import VOCAB as FORWARD_VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_bundle import packed_bundle
from scripted_lm import greedy_reference
from scripted_text import DRAFT, PROMPT, SELF, TARGET, VOCAB
from toy_bundle import toy_bundle

from dsc.bundle_schema.dflash_config import DflashConfig, Proposer
from dsc.bundle_schema.errors import PlanError
from dsc.bundle_schema.kv_layout import draft_shares, resized
from dsc.bundle_schema.kv_plan import SlotRef
from dsc.kernels.native import find_library
from dsc.runtime import load
from dsc.runtime.schedule_costs import LiveCosts

KINDS = {kind: Proposer() for kind in ("self", "ngram", "cache")}


def shared_bundle(path, draft=DRAFT, config=None, max_length=128):
    config = config or DflashConfig(proposers=KINDS)
    return toy_bundle(path, TARGET, draft, draft_kind="self", config=config, max_length=max_length, shared=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Half of the draft's tokens are wrong, so rows of wrong tokens lie past the target's all the time."""
    return load(shared_bundle(tmp_path_factory.mktemp("shared") / "toy.dsmodel"), verify="never")


def test_the_draft_takes_no_memory_and_reads_nothing(model):
    plan = model.bundle.arena.plan
    assert draft_shares(plan)
    assert [zone.name for zone in plan.zones] == ["target"]
    assert {slot.offset for slot in plan.slots if slot.owner == "draft"} == {
        slot.offset for slot in plan.slots if slot.owner == "target"
    }
    assert model.bundle.draft.zone is model.bundle.target.zone
    result = model.generate(PROMPT * 20, 20, speculation=SELF, reuse_cache=False)
    assert 0 < result.stats.accepted < result.stats.evaluated


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60),
    n_new=st.integers(1, 60),
    window=st.integers(1, 16),
    reuse=st.booleans(),
)
@settings(max_examples=60)
def test_greedy_output_is_the_targets(model, prompt, n_new, window, reuse):
    speculation = {"proposer": "self", "window": window, "fallback": False}
    result = model.generate(prompt, n_new, speculation=speculation, reuse_cache=reuse)
    assert list(result.ids) == greedy_reference(TARGET, prompt, n_new)
    assert model.bundle.target.length == len(prompt) + n_new - 1


def test_a_draft_that_is_the_target_is_always_right(tmp_path):
    model = load(shared_bundle(tmp_path / "toy.dsmodel", draft=TARGET), verify="never")
    for prompt in (PROMPT, PROMPT * 9, PROMPT * 2):
        result = model.generate(prompt, 40, speculation=SELF)
        assert list(result.ids) == greedy_reference(TARGET, prompt, 40)
        assert result.stats.accepted == result.stats.evaluated > 0


def test_streams_that_are_left_and_failed_drafts_leave_the_cache_right(model, monkeypatch):
    for left_after in (1, 2, 5):
        stream = model.stream(PROMPT, 50, speculation=SELF)
        for _ in range(left_after):
            next(stream)
        stream.close()
        assert list(model.generate(PROMPT, 40, speculation="off").ids) == greedy_reference(TARGET, PROMPT, 40)
    forward, calls = model.bundle.draft.session.forward, iter(range(100))

    def failing(*arguments):
        if next(calls) == 7:
            raise RuntimeError("the draft's forward fails")
        return forward(*arguments)

    monkeypatch.setattr(model.bundle.draft.session, "forward", failing)
    with pytest.raises(RuntimeError, match="forward fails"):
        model.generate(PROMPT, 50, speculation=SELF)
    assert model.bundle.draft.length == model.bundle.target.length
    monkeypatch.undo()
    for speculation in (SELF, "off"):
        assert list(model.generate(PROMPT, 50, speculation=speculation).ids) == greedy_reference(TARGET, PROMPT, 50)


def test_measured_costs_age_once_a_request_and_not_for_one_that_never_began(model, monkeypatch):
    ages = []
    monkeypatch.setattr(LiveCosts, "age", lambda costs: ages.append(costs))
    model.stream(PROMPT, 5, speculation=SELF)
    assert not ages
    model.generate(PROMPT, 5, speculation=SELF)
    assert len(ages) == 1


def test_a_full_cache_ends_the_text_and_not_the_guard(model):
    result = model.generate(PROMPT * 30, speculation=SELF)
    assert list(result.ids) == greedy_reference(TARGET, PROMPT * 30, 128 - 90)
    model.bundle.arena.check_guards()


def test_rows_of_drafts_are_cleared_where_rollback_is_secure(tmp_path):
    config = DflashConfig(proposers=KINDS, secure_rollback=True)
    model = load(shared_bundle(tmp_path / "toy.dsmodel", config=config), verify="never")
    result = model.generate(PROMPT, 30, speculation=SELF)
    assert list(result.ids) == greedy_reference(TARGET, PROMPT, 30)
    for pool in model.bundle.target.zone.pools.values():
        assert not pool[:, :, model.bundle.target.length :].any()


def test_an_engine_runs_shared_drafts_of_many_sequences(model):
    prompts = [PROMPT, [9, 9], [0, 8, 2, 2, 5], [6] * 40, [7, 7], PROMPT * 5]
    with model.engine(slots=3) as engine:
        tickets = [engine.submit(prompt, max_new_tokens=60, speculation=SELF) for prompt in prompts]
        results = [ticket.result() for ticket in tickets]
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.ids) == greedy_reference(TARGET, prompt, 60)
        assert 0 < result.stats.accepted < result.stats.evaluated


@pytest.mark.parametrize("draft_seed", [0, 1])
@pytest.mark.parametrize("window", [None, 40])
def test_attention_over_shared_and_ring_rows_gives_the_plain_text(tmp_path, window, draft_seed):
    if find_library().path is None:
        pytest.skip(find_library().reason)
    config = DflashConfig(proposers={"self": Proposer()})
    options = {"draft_seed": draft_seed, "draft_kind": "self", "shared": True, "config": config}
    model = load(packed_bundle(tmp_path / "toy.dsmodel", 900, window=window, **options), verify="never")
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, FORWARD_VOCAB, n).tolist() for n in (3, 130, 420, 700)]
    speculation = {"proposer": "self", "window": 8, "fallback": False}
    plain = [model.generate(prompt, 60, speculation="off", reuse_cache=False).ids for prompt in prompts]
    for prompt, wanted in zip(prompts, plain, strict=True):
        result = model.generate(prompt, 60, speculation=speculation, reuse_cache=False)
        assert result.ids == wanted
        assert (result.stats.accepted == result.stats.evaluated) == (draft_seed == 0)
    with model.engine(slots=3) as engine:
        tickets = [engine.submit(prompt, max_new_tokens=60, speculation=speculation) for prompt in prompts]
        assert [ticket.result().ids for ticket in tickets] == plain


def test_memory_pressure_leaves_the_targets_rows(model):
    stream = model.stream(PROMPT, 60, speculation=SELF)
    next(stream)
    model._relieve(True)
    stream.finish()
    model._relieve(False)
    assert list(stream.result.ids) == greedy_reference(TARGET, PROMPT, 60)


def test_a_plan_for_another_length_shares_too(model):
    plan = resized(model.bundle.arena.plan, 30, 4)
    assert draft_shares(plan)
    assert plan.slot("draft", 0, "k").shape == plan.slot("target", 0, "k").shape


def test_layers_that_share_otherwise_are_refused(model):
    plan = model.bundle.arena.plan
    target = SlotRef(owner="target", layer=0, role="k")
    for wrong in (None, target):
        slots = [
            slot.model_copy(update={"shared_with": wrong}) if (slot.owner, slot.role) == ("draft", "v") else slot
            for slot in plan.slots
        ]
        with pytest.raises(PlanError, match="all layers of a draft, or none"):
            draft_shares(plan.model_copy(update={"slots": tuple(slots)}))
