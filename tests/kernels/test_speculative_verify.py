"""SpeculativeVerify: bodies against the reference, the reference against loops, and the corners of both."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from verdict_law import TOP, plain_distribution
from verdicts import IMPLEMENTATIONS, by_body, by_reference, settings

from dsc.bundle_schema.errors import KernelError
from dsc.kernels.speculative_verify import MODES, PENALTY_INPUTS, function_for, input_names, make_inputs
from dsc.kernels.speculative_verify_penalties import penalised_logits
from dsc.kernels.speculative_verify_rules import draw, target_distribution
from dsc.runtime.sampling import LogitsEditor, SamplingParams

SHAPES = [
    {"B": 5, "K": 3, "V": 37},
    {"B": 1, "K": 1, "V": 1},
    {"B": 2, "K": 0, "V": 64},
    {"B": 7, "K": 4, "V": 256},
    {"B": 3, "K": 5, "V": 999},
    {"B": 1, "K": 16, "V": 50},
    {"B": 2, "K": 2, "V": 5000},
]
FORMS = [(mode, False) for mode in MODES] + [("rejection", True), ("block", True)]
SAMPLED = MODES[1:]


def assert_equal(inputs, mode):
    """Both implementations' verdict, equal to the bit."""
    wanted, found = by_reference(inputs, mode), by_body(inputs, mode)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array, err_msg=f"{mode} {name}")
    return wanted


@pytest.mark.parametrize(("mode", "sparse"), FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_body_equals_the_reference(shape, mode, sparse):
    width = max(1, shape["V"] // 3) if sparse else shape["V"]
    for seed in range(3):
        inputs = make_inputs({**shape, "R": shape["K"] + 1, "W": width}, seed)
        if mode == "greedy":  # some drafts that hold
            best = inputs["logits"].argmax(-1)[:, : shape["K"]]
            held = np.random.default_rng(seed).random(best.shape) < 0.8
            inputs["draft_ids"] = np.where(held, best, inputs["draft_ids"])
        assert_equal(inputs, mode)


@pytest.mark.parametrize(("mode", "sparse"), FORMS)
@pytest.mark.parametrize("history", [0, 1, 40])
def test_penalties_equal_the_reference(history, mode, sparse):
    for shape in SHAPES[:5]:
        width = max(1, shape["V"] // 3) if sparse else shape["V"]
        for seed in range(2):
            assert_equal(make_inputs({**shape, "R": shape["K"] + 1, "W": width, "H": history}, seed), mode)


@given(st.data())
def test_penalised_rows_are_those_of_plain_decoding(data):
    """One row at a time, each with its own history, as the runtime edits them: equal to the bit."""
    vocab, n_prompt = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 6))
    ids = st.integers(0, vocab - 1)
    history = data.draw(st.lists(ids, min_size=n_prompt, max_size=20))
    drafts = data.draw(st.lists(ids, max_size=4))
    repetition = data.draw(st.sampled_from([1.0, 1.2, 0.7]))
    presence, frequency = data.draw(st.sampled_from([(0.0, 0.0), (0.3, 0.0), (-0.2, 0.15), (0.7, 1.9)]))
    logits = np.random.default_rng(len(history)).standard_normal((len(drafts) + 1, vocab)).astype(np.float32)
    penalties = np.array([repetition, presence, frequency], np.float32)
    found = penalised_logits(logits, drafts, np.array([*history, -1, -1]), n_prompt, penalties)
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    for i, row in enumerate(logits):
        alone = row[None].copy()
        LogitsEditor(params, vocab, n_prompt)(alone, history + drafts[:i], [])
        np.testing.assert_array_equal(found[i], alone[0])


def block_of(logits, drafts, uniforms, **filters):
    """One sequence; q is uniform over the vocabulary."""
    k, vocab = len(drafts), logits.shape[-1]
    return {
        "logits": np.asarray(logits, np.float32).reshape(1, k + 1, vocab),
        "draft_ids": np.array([drafts], np.int64).reshape(1, k),
        "draft_lengths": np.array([k], np.int32),
        "uniforms": np.array([uniforms], np.float32),
        "q": np.full((1, k, vocab), 1 / vocab, np.float32),
        **settings(1, **filters),
    }


def outcome(found):
    return tuple(int(array[0]) for array in found.values())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_no_drafts_draw_from_the_only_row(mode, implementation):
    logits = np.log([[0.1, 0.2, 0.3, 0.4]])
    for uniform, token in ((0.0, 0), (0.05, 0), (0.29, 1), (0.31, 2), (0.65, 3), (0.999, 3)):
        found = IMPLEMENTATIONS[implementation](block_of(logits, [], [uniform]), mode)
        assert outcome(found) == (0, 3 if mode == "greedy" else token, 0)


@pytest.mark.parametrize("mode", MODES)
def test_drafts_that_the_target_is_sure_of_all_hold(mode):
    logits = np.full((4, 6), -1e4)
    logits[range(4), [2, 5, 0, 3]] = 0
    found = assert_equal(block_of(logits, [2, 5, 0], [TOP, TOP, TOP, 0.5]), mode)
    assert outcome(found) == (3, 3, 0)


@pytest.mark.parametrize("mode", MODES)
def test_drafts_that_the_target_rules_out_all_fail(mode):
    """Even at a uniform of 0: a test that admits equality would let them pass."""
    logits = np.zeros((4, 6))
    logits[:, 1] = -np.inf
    logits[:, 4] = 1
    found = assert_equal(block_of(logits, [1, 1, 1], [0, 0, 0, 0.3]), mode)
    n_accepted, token, cause = outcome(found)
    assert (n_accepted, cause) == (0, 1)
    assert token != 1


@pytest.mark.parametrize("mode", SAMPLED)
@pytest.mark.parametrize("filters", [{"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.4}, {"top_p": 0.9, "top_k": 7}], ids=str)
def test_tokens_outside_the_filters_never_appear(mode, filters):
    rng = np.random.default_rng(3)
    n, k, vocab = 4000, 2, 23
    row = rng.standard_normal(vocab).astype(np.float32)
    kept = plain_distribution(row, 1.2, **filters) > 0
    assert 0 < kept.sum() < vocab
    inputs = {
        "logits": np.tile(row, (n, k + 1, 1)),
        "draft_ids": rng.integers(0, vocab, (n, k)),
        "draft_lengths": rng.integers(0, k + 1, n).astype(np.int32),
        "uniforms": rng.choice([0, 1e-30, 0.2, 0.7, TOP, 1.0], (n, k + 1)).astype(np.float32),
        "q": np.full((n, k, vocab), 1 / vocab, np.float32),
        **settings(n, 1.2, **filters),
    }
    found = by_body(inputs, mode)
    assert kept[found["next_token"]].all()
    held = inputs["draft_ids"][np.arange(k) < found["n_accepted"][:, None]]
    assert held.size
    assert kept[held].all()


@pytest.mark.parametrize("mode", SAMPLED)
def test_a_nucleus_wider_than_the_first_head(mode):
    """Nearly flat rows: top-p needs thousands of tokens, so the sorted head is widened, twice."""
    rng = np.random.default_rng(5)
    for top_p in (0.2, 0.55, 0.95):
        inputs = make_inputs({"B": 2, "K": 2, "R": 3, "V": 6001, "W": 6001}, 1)
        inputs |= {"logits": (0.2 * rng.standard_normal((2, 3, 6001))).astype(np.float32), **settings(2, top_p=top_p)}
        inputs["top_k"][1] = 700
        assert_equal(inputs, mode)


@pytest.mark.parametrize("mode", SAMPLED)
def test_equal_logits_stay_together(mode):
    """400 tokens share the fifth place: more than the head holds, and all are kept."""
    row = np.full(2000, -3.0)
    row[100:500] = 1.0
    row[[7, 700, 1500, 1900]] = 2.0
    inputs = block_of(np.tile(row, (2, 1)), [300], [0.9999, 0.5], top_k=5)
    assert np.count_nonzero(target_distribution(row, 1.0, top_k=5)) == 404
    assert 100 <= outcome(assert_equal(inputs, mode))[1] < 500


@pytest.mark.parametrize("mode", SAMPLED)
def test_masked_vocabulary_with_fewer_tokens_than_top_k(mode):
    logits = np.full((2, 777), -np.inf)
    logits[:, [5, 300, 776]] = [1.0, 0.5, 0.25]
    for uniform in (0.0, 0.5, TOP, 1.0):
        found = assert_equal(block_of(logits, [9], [0.0, uniform], top_k=40, top_p=0.99), mode)
        assert outcome(found)[0] == 0
        assert outcome(found)[1] in (5, 300, 776)


@pytest.mark.parametrize("mode", SAMPLED)
@pytest.mark.parametrize("token", [-1, 4, 2**40])
def test_a_draft_outside_the_vocabulary_fails_and_takes_nothing_away(mode, token):
    logits = np.zeros((2, 4))
    inputs = block_of(logits, [token], [0.0, 0.9])
    inputs["q"][:] = [0.25, 0.25, 0.5, 0]
    found = assert_equal(inputs, mode)
    assert outcome(found)[::2] == (0, 1)
    assert outcome(found)[1] == 3


@pytest.mark.parametrize("mode", ["rejection", "block"])
@pytest.mark.parametrize("uniform", [0.1, 0.3, 0.6, 0.8])
def test_an_empty_residual_falls_back_to_the_target(mode, uniform):
    """p equals q and the draft fails nevertheless: only a draft that q cannot have produced does that."""
    inputs = block_of(np.zeros((2, 4)), [4], [0.0, uniform])
    assert outcome(assert_equal(inputs, mode)) == (0, int(uniform * 4), 1)


def test_the_last_uniforms_never_draw_a_masked_token():
    """Sums of a group and within it round differently; the first token of a group must not catch what falls between."""
    rng = np.random.default_rng(6)
    logits = rng.standard_normal((1500, 1, 128)).astype(np.float32)
    logits[:, :, [0, 127]] = -np.inf
    inputs = {
        "logits": logits,
        "draft_ids": np.zeros((1500, 0), np.int64),
        "draft_lengths": np.zeros(1500, np.int32),
        "uniforms": np.full((1500, 1), 1, np.float32),
        **settings(1500),
    }
    assert set(by_body(inputs, "deterministic")["next_token"]) == {126}
    assert set(by_reference(inputs, "deterministic")["next_token"]) == {126}


@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_a_sparse_proposal_is_the_dense_one(mode):
    inputs = make_inputs({"B": 6, "K": 3, "R": 4, "V": 53, "W": 11}, 2)
    dense = {name: array for name, array in inputs.items() if name != "q_ids"}
    dense["q"] = np.zeros((6, 3, 53), np.float32)
    np.put_along_axis(dense["q"], inputs["q_ids"].astype(np.int64), inputs["q"], -1)
    sparse_found, dense_found = assert_equal(inputs, mode), assert_equal(dense, mode)
    for name in sparse_found:
        np.testing.assert_array_equal(sparse_found[name], dense_found[name])


def test_greedy_takes_the_first_of_equal_logits_in_any_group():
    logits = np.zeros((3, 256))
    logits[0, [130, 131, 200]] = logits[1, [127, 128]] = logits[2, [3, 255]] = 5
    assert outcome(assert_equal(block_of(logits, [130, 128], [0, 0, 0]), "greedy")) == (1, 127, 1)
    assert outcome(assert_equal(block_of(logits, [130, 127], [0, 0, 0]), "greedy")) == (2, 3, 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_does_not_depend_on_its_neighbours(mode):
    inputs = make_inputs({"B": 6, "K": 4, "R": 5, "V": 301, "W": 301}, 9)
    whole = by_body(inputs, mode)
    for b in range(6):
        alone = by_body({name: array[b : b + 1] for name, array in inputs.items()}, mode)
        assert outcome(alone) == tuple(int(array[b]) for array in whole.values())


@given(
    logits=st.lists(st.integers(-6, 6), min_size=1, max_size=12),
    temperature=st.sampled_from([0.4, 1.0, 2.5]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.13, 0.52, 0.87, 0.991, 1.0]),
    min_p=st.sampled_from([0.0, 0.0123, 0.31]),
)
def test_filters_equal_those_written_token_by_token(logits, temperature, top_k, top_p, min_p):
    row = np.array(logits, np.float32)  # integers, so many are equal
    found = target_distribution(row, temperature, top_k, top_p, min_p)
    np.testing.assert_allclose(found, plain_distribution(row, temperature, top_k, top_p, min_p), atol=1e-12)
    assert found.sum() == pytest.approx(1)


@given(st.lists(st.sampled_from([0.0, 1e-9, 0.3, 2.0]), min_size=1, max_size=9), st.sampled_from([0.0, 0.4, TOP, 1.0]))
def test_a_draw_never_takes_a_token_without_weight(weights, uniform):
    if sum(weights) > 0:
        assert weights[draw(np.array(weights), uniform)] > 0


def test_the_body_fits_the_node():
    values = [ir.Value(name=name) for name in input_names("block", sparse=True)]

    def node(mode, count):
        return ir.node("SpeculativeVerify", values[:count], {"mode": mode}, domain="ai.dspark", num_outputs=3)

    counts = {"greedy": (3, 10), "deterministic": (8, 9), "rejection": (9,), "block": (9,)}
    for mode, given_counts in counts.items():
        for count in given_counts:
            assert function_for(node(mode, count)).overload == mode
    assert function_for(node("block", 10)).overload == "block_sparse"
    with pytest.raises(KernelError, match=r"greedy, deterministic, rejection, block.*'typical'"):
        function_for(node("typical", 9))
    with pytest.raises(KernelError, match="requires the input q"):
        function_for(node("rejection", 8))
    with pytest.raises(KernelError, match="requires the input uniforms"):
        function_for(node("deterministic", 3))
    values += [ir.Value(name=name) for name in PENALTY_INPUTS]
    assert function_for(node("greedy", 13)).overload == "greedy_penalties"
    assert function_for(node("block", 13)).overload == "block_sparse_penalties"
    with pytest.raises(KernelError, match="greedy with penalties requires the input penalties"):
        function_for(node("greedy", 12))
