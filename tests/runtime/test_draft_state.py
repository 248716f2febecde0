"""A draft's cache is its own: it lags, pauses, starts anew and ends without the target's, and is right again after."""

import numpy as np
import onnx
import pytest
from forward_graphs import VOCAB as FORWARD_VOCAB
from packed_bundle import packed_bundle
from scripted_lm import greedy_reference, scripted_lm
from scripted_text import PROMPT, SELF, TARGET, VOCAB
from toy_bundle import toy_bundle, toy_info, write_bundle

from dsc.bundle_schema.dflash_config import CalibratedPolicy, CostCurve, DflashConfig, Proposer
from dsc.kernels.native import find_library
from dsc.runtime import load

PAUSES = {
    "disabled": {"proposers.self.enabled": False},
    "context too long": {"proposers.self.max_context": 1},
}


@pytest.fixture
def model(tmp_path):
    """A draft that is the target: a draft of its that fails was made from a cache that is wrong."""
    config = DflashConfig(proposers={kind: Proposer() for kind in ("self", "ngram", "cache")})
    path = toy_bundle(tmp_path / "toy.dsmodel", TARGET, TARGET, draft_kind="self", config=config, max_length=128)
    return load(path, verify="never")


def back(changes):
    """The changes that undo `changes`."""
    return {path: True if value is False else 2**30 for path, value in changes.items()}


@pytest.mark.parametrize("reason", PAUSES)
@pytest.mark.parametrize("length", [1, 2, 9])
def test_a_draft_that_rested_within_a_generation_is_right_again(model, reason, length):
    stream = model.stream(PROMPT, 90, speculation=SELF)
    for number, _ in enumerate(stream):
        if number in (3, 6 + length):
            model.update_config(PAUSES[reason])
        if number in (3 + length, 6 + 2 * length):
            before = stream.stats.accepted
            model.update_config(back(PAUSES[reason]))
    stats = stream.result.stats
    assert list(stream.result.ids) == greedy_reference(TARGET, PROMPT, 90)
    assert stats.fallbacks[reason] == 2 * length
    assert stats.accepted == stats.evaluated > before > 0


@pytest.mark.parametrize("reason", PAUSES)
def test_drafts_that_rested_in_an_engine_are_right_again(model, reason):
    prompts = [PROMPT, [9, 9], [0, 8, 2, 2, 5]]
    engine = model.engine(slots=3, background=False)
    tickets = [engine.submit(prompt, max_new_tokens=90, speculation=SELF) for prompt in prompts]
    for number in range(14):
        if number in (4, 10):
            model.update_config(PAUSES[reason])
        if number in (8, 11):
            model.update_config(back(PAUSES[reason]))
        engine.step()
    engine.run()
    for prompt, ticket in zip(prompts, tickets, strict=True):
        assert list(ticket.result().ids) == greedy_reference(TARGET, prompt, 90)
        assert ticket.stats.fallbacks[reason] == 5
        assert ticket.stats.accepted == ticket.stats.evaluated > 0


def test_drafts_that_were_not_admitted_for_a_while_are_right_again(tmp_path):
    """Rows cost so much that sequences of one round take turns with their drafts."""
    curve = CostCurve(
        device="toy",
        verify_ms=tuple(10.0 + 3 * max(rows - 3, 0) for rows in range(16)),
        draft_ms={"self": tuple(0.2 * k for k in range(1, 17))},
    )
    rows = {"self": Proposer(), "ngram": Proposer(enabled=False)}
    calibrated = CalibratedPolicy(refresh_costs=False)
    config = DflashConfig(policy="batched", costs=(curve,), proposers=rows, calibrated=calibrated)
    path = toy_bundle(tmp_path / "toy.dsmodel", TARGET, TARGET, draft_kind="self", config=config, max_length=128)
    model = load(path, verify="never")
    prompts = [PROMPT, [9, 9], [0, 8, 2, 2, 5], [6], [7, 7], [1, 2]]
    engine = model.engine(slots=4, background=False)
    speculation = {"proposer": "self", "fallback": False}
    tickets = [engine.submit(prompt, max_new_tokens=90, speculation=speculation) for prompt in prompts]
    engine.run()
    for prompt, ticket in zip(prompts, tickets, strict=True):
        assert list(ticket.result().ids) == greedy_reference(TARGET, prompt, 90)
        assert ticket.stats.accepted == ticket.stats.evaluated > 0
    assert sum(ticket.stats.fallbacks["not admitted"] for ticket in tickets) > 50


def told_its_positions(table):
    """The scripted model, but for its positions: it reads them from the input in place of counting from the cache."""
    graph = scripted_lm(table)
    (counted,) = (node for node in graph.graph.node if node.op_type == "Range")
    counted.CopyFrom(onnx.helper.make_node("Reshape", ["position_ids", "flat"], ["positions"]))
    return graph


@pytest.mark.parametrize("target_is_told", [True, False])
@pytest.mark.parametrize("draft_is_told", [True, False])
def test_either_model_may_lack_the_positions_that_the_other_is_told(tmp_path, target_is_told, draft_is_told):
    target, draft = (
        told_its_positions(TARGET) if told else scripted_lm(TARGET, position_ids=False)
        for told in (target_is_told, draft_is_told)
    )
    info = toy_info(VOCAB, 800)
    path = write_bundle(tmp_path / "toy.dsmodel", target, info, draft=draft, draft_info=info, draft_kind="self")
    model = load(path, verify="never")
    for n_prompt in (1, 2, 7, 40, 600):
        prompt = [(5 * i + 3) % VOCAB for i in range(n_prompt)]
        result = model.generate(prompt, 40, speculation=SELF)
        assert list(result.ids) == greedy_reference(TARGET, prompt, 40)
        assert result.stats.accepted == result.stats.evaluated > 0


@pytest.mark.parametrize("proposer", ["self", "ngram", "cache"])
def test_sequences_that_fill_their_slots_leave_their_neighbours_alone(model, proposer):
    length = model.max_length
    prompts = [(PROMPT * 50)[:n_prompt] for n_prompt in (length - 2, 5, length - 1, length - 2, length - 17, 9, 30)]
    speculation = {"proposer": proposer, "window": 16, "fallback": False}
    engine = model.engine(slots=4, background=False)
    tickets = [engine.submit(prompt, speculation=speculation) for prompt in prompts * 2]
    engine.run()
    engine._rounds._pool.arena.check_guards()
    for prompt, ticket in zip(prompts * 2, tickets, strict=True):
        assert list(ticket.result().ids) == greedy_reference(TARGET, prompt, length - len(prompt))
        assert ticket.result().finish_reason == "length"


def test_packed_sequences_that_fill_their_slots_leave_their_neighbours_alone(tmp_path):
    library = find_library()
    if library.path is None:
        pytest.skip(library.reason)
    model = load(packed_bundle(tmp_path / "tiny.dsmodel"), kernels="native")
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, FORWARD_VOCAB, n_prompt).tolist() for n_prompt in (198, 3, 199, 198, 183, 60)]
    prompts[1] = [5, 6, 7, 8] * 40
    speculation = {"proposer": "ngram", "window": 16, "fallback": False}
    wanted = [model.generate(prompt, speculation="off").ids for prompt in prompts]
    assert [len(ids) for ids in wanted] == [200 - len(prompt) for prompt in prompts]
    engine = model.engine(slots=3, background=False)
    tickets = [engine.submit(prompt, speculation=speculation) for prompt in prompts]
    engine.run()
    engine._rounds._pool.arena.check_guards()
    assert [ticket.result().ids for ticket in tickets] == wanted
