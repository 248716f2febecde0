"""The native VerifyAttention: right, in place, the same bits for any split of the rows, blind to stale rows."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_operator import attend, session_of

from dsc.kernels.verify_attention import VERIFY_ATTENTION, make_inputs, reference
from dsc.kernels.verify_attention_body import function_body

SHAPES = [
    VERIFY_ATTENTION.example,
    {"B": 1, "Hq": 3, "Hkv": 1, "S": 1, "D": 8, "M": 1},
    {"B": 2, "Hq": 4, "Hkv": 4, "S": 9, "D": 5, "M": 64},
    {"B": 1, "Hq": 9, "Hkv": 3, "S": 17, "D": 64, "M": 330},
    {"B": 2, "Hq": 8, "Hkv": 1, "S": 7, "D": 80, "M": 300},
    {"B": 1, "Hq": 4, "Hkv": 1, "S": 3, "D": 96, "M": 260},
    {"B": 1, "Hq": 6, "Hkv": 2, "S": 40, "D": 128, "M": 140},
    {"B": 2, "Hq": 2, "Hkv": 1, "S": 2, "D": 256, "M": 129},
]
VARIANTS = [{}, {"window": 1}, {"window": 50, "softcap": 1.5}, {"window": 1000, "softcap": 20.0}]


def inputs_of(axes, seed, sinks=False, tree=False):
    inputs = make_inputs(axes, seed)
    dropped = {name for name, kept in (("sinks", sinks), ("tree_mask", tree)) if not kept}
    return {name: value for name, value in inputs.items() if name not in dropped}


def poisoned(inputs):
    """The same with NaN wherever no key or value has been written yet."""
    dirty = inputs | {name: inputs[name].copy() for name in ("k_pool", "v_pool")}
    for b, past in enumerate(inputs["past_lengths"]):
        dirty["k_pool"][b, :, past:] = np.nan
        dirty["v_pool"][b, :, past:] = np.nan
    return dirty


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("attributes", VARIANTS, ids=str)
@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_it_agrees_with_the_reference(axes, attributes, sinks, tree):
    inputs = inputs_of(axes, 3, sinks, tree)
    attributes = {"scale": 0.2} | attributes
    found = attend(inputs, attributes, threads=2)
    for name, value in reference(inputs, attributes).items():
        VERIFY_ATTENTION.assert_agrees(name, found[name], value)


@given(
    rows=st.integers(2, 20),
    past=st.integers(0, 300),
    group=st.sampled_from([1, 3, 4, 8]),
    size=st.sampled_from([7, 16, 40]),
    window=st.sampled_from([-1, 5, 140]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=25)
def test_rows_are_the_same_bits_one_by_one_and_together(rows, past, group, size, window, sinks, seed):
    inputs = inputs_of({"B": 1, "Hq": 2 * group, "Hkv": 2, "S": rows, "D": size, "M": 321}, seed, sinks)
    inputs["past_lengths"][:] = past
    attributes = {"scale": 0.3, "window": window}
    together = attend(inputs, attributes, threads=2)
    session = session_of(VERIFY_ATTENTION, inputs, attributes)
    pools = {name: inputs[name] for name in ("k_pool", "v_pool")}
    for row in range(rows):
        one = {name: np.ascontiguousarray(inputs[name][:, :, row : row + 1]) for name in ("q", "k", "v")}
        length = {"past_lengths": np.array([past + row], np.int32)}
        found = session.run(None, inputs | one | pools | length)
        np.testing.assert_array_equal(found[0][:, :, 0], together["o"][:, :, row])
        pools = {"k_pool": found[1], "v_pool": found[2]}
    np.testing.assert_array_equal(pools["k_pool"], together["k_pool_out"])


def test_a_sequence_is_the_same_bits_alone_and_in_a_ragged_batch():
    inputs = inputs_of({"B": 3, "Hq": 6, "Hkv": 2, "S": 5, "D": 24, "M": 300}, 5)
    inputs["past_lengths"][:] = [0, 127, 290]
    together = attend(inputs, {"scale": 0.2}, threads=2)
    for b in range(3):
        alone = attend({name: value[b : b + 1] for name, value in inputs.items()}, {"scale": 0.2})
        np.testing.assert_array_equal(alone["o"][0], together["o"][b])


@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_rows_not_yet_written_never_matter(axes):
    inputs = inputs_of(axes, 7, tree=True)
    np.testing.assert_array_equal(attend(poisoned(inputs), {})["o"], attend(inputs, {})["o"])


def test_rows_of_a_rejected_draft_leave_no_trace():
    axes = {"B": 1, "Hq": 3, "Hkv": 1, "S": 6, "D": 16, "M": 200}
    inputs = poisoned(inputs_of(axes, 9) | {"past_lengths": np.array([125], np.int32)})
    draft = attend(inputs, {})
    after = inputs_of(axes, 11) | {"past_lengths": np.array([127], np.int32)}
    pools = {name: draft[f"{name}_out"].copy() for name in ("k_pool", "v_pool")}
    clean = {name: value.copy() for name, value in pools.items()}
    for value in clean.values():
        value[:, :, 127:] = 0
    np.testing.assert_array_equal(attend(after | pools, {})["o"], attend(after | clean, {})["o"])


def test_a_bad_new_row_shows_only_where_it_is_seen():
    inputs = inputs_of({"B": 1, "Hq": 3, "Hkv": 1, "S": 5, "D": 16, "M": 150}, 13, tree=True)
    inputs["past_lengths"][:] = 125
    inputs["tree_mask"][0, 0] = np.tril(np.ones((5, 5), np.bool_))
    inputs["tree_mask"][0, 0, 4, 2] = False
    clean = attend(inputs, {})["o"]
    inputs["v"][0, 0, 2] = np.inf
    found = attend(inputs, {})["o"]
    np.testing.assert_array_equal(found[:, :, [0, 1, 4]], clean[:, :, [0, 1, 4]])
    assert not np.isfinite(found[:, :, [2, 3]]).any()


def bound(session, inputs, pools, out):
    binding = session.io_binding()
    for name, value in inputs.items():
        if name not in pools:
            binding.bind_cpu_input(name, value)
    for name, value in pools.items():
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(f"{name}_out", value)
    binding.bind_ortvalue_output("o", out)
    return binding


@pytest.mark.parametrize("threads", [1, 2])
def test_pools_are_updated_in_place_when_bound_so(threads):
    inputs = inputs_of({"B": 2, "Hq": 6, "Hkv": 2, "S": 4, "D": 24, "M": 140}, 15)
    wanted = attend(inputs, {"scale": 0.2})
    session = session_of(VERIFY_ATTENTION, inputs, {"scale": 0.2}, threads)
    memory = {name: inputs[name].copy() for name in ("k_pool", "v_pool")}
    pools = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in memory.items()}
    out = ort.OrtValue.ortvalue_from_numpy(np.zeros_like(inputs["q"]))
    session.run_with_iobinding(bound(session, inputs, pools, out))
    np.testing.assert_array_equal(out.numpy(), wanted["o"])
    for name, value in memory.items():
        np.testing.assert_array_equal(value, wanted[f"{name}_out"])


@pytest.mark.parametrize("overload", ["", "plain"])
def test_it_runs_in_place_of_a_function_body(overload):
    inputs = inputs_of(VERIFY_ATTENTION.example, 17)
    wanted = attend(inputs, {"scale": 0.2})
    function = function_body()
    function.overload = overload
    session = session_of(VERIFY_ATTENTION, inputs, {"scale": 0.2}, function=function, overload=overload)
    np.testing.assert_array_equal(session.run(["o"], inputs)[0], wanted["o"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"past_lengths": np.array([0, 33, 0], np.int32)}, "within the pool"),
        ({"past_lengths": np.array([0, -1, 0], np.int32)}, "within the pool"),
        ({"past_lengths": np.array([0, 0], np.int32)}, "past_lengths must be"),
        ({"v": np.zeros((3, 2, 4, 24), np.float32)}, "k and v must be"),
        ({"v_pool": np.zeros((3, 2, 36, 24), np.float32)}, "the pools must be"),
        ({"q": np.zeros((3, 7, 5, 24), np.float32)}, "a multiple of KV heads"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_inputs_are_refused(change, message):
    inputs = inputs_of(VERIFY_ATTENTION.example, 19)
    session = session_of(VERIFY_ATTENTION, inputs, {})
    with pytest.raises(Exception, match=message):
        session.run(None, inputs | change)
