"""Packed rows of several sequences: the reference, the bodies and the native operators against sequences alone."""

from __future__ import annotations

import numpy as np
import pytest
from attention_by_loops import attend as attend_by_loops
from attention_cases import by_body, to_qkv
from hypothesis import given, settings
from hypothesis import strategies as st
from native_operator import run_native, session_of

from dsc.kernels import qkv_attention, verify_attention, verify_attention_body
from dsc.kernels.qkv_attention import QKV_ATTENTION
from dsc.kernels.verify_attention import VERIFY_ATTENTION

ATTRIBUTES = {"scale": 0.2, "window": 40, "softcap": 3.0}
HEADS, KV_HEADS, DIM = 6, 2, 24


def packed_case(counts, seed, sinks=False, tree=False, rows=170):
    """Inputs of `VerifyAttention`: `counts` new rows of the sequence in each slot, over pools with garbage."""
    total = sum(counts)
    axes = {"B": 1, "Hq": HEADS, "Hkv": KV_HEADS, "S": total, "D": DIM, "M": rows}
    inputs = verify_attention.make_inputs(axes, seed)
    rng = np.random.default_rng(seed + 1)
    for name in ("k_pool", "v_pool"):
        inputs[name] = rng.standard_normal((len(counts), KV_HEADS, rows, DIM), dtype=np.float32)
    inputs["past_lengths"] = np.array([rng.integers(0, rows - count + 1) for count in counts], np.int32)
    inputs["row_offsets"] = np.cumsum([0, *counts], dtype=np.int32)
    dropped = {name for name, kept in (("sinks", sinks), ("tree_mask", tree)) if not kept}
    return {name: value for name, value in inputs.items() if name not in dropped}


def one_sequence(inputs, slot):
    """The rows and the pool of one slot as a batch of its own."""
    first, last = inputs["row_offsets"][slot : slot + 2]
    axis = {"qkv": 1, "cos": 1, "sin": 1, "q": 2, "k": 2, "v": 2}
    alone = {}
    for name, value in inputs.items():
        if name in axis:
            alone[name] = np.ascontiguousarray(value.take(range(first, last), axis[name]))
        elif name in ("k_pool", "v_pool", "past_lengths"):
            alone[name] = value[slot : slot + 1].copy()
        elif name == "tree_mask":
            alone[name] = np.ascontiguousarray(value[:, :, first:last, first:last])
        elif name == "sinks":
            alone[name] = value
    return alone, slice(first, last)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_reference_agrees_with_one_query_at_a_time(sinks, tree):
    inputs = packed_case([3, 0, 1, 5], 1, sinks, tree)
    found = verify_attention.reference(inputs, ATTRIBUTES)
    for slot in (0, 2, 3):
        alone, rows = one_sequence(inputs, slot)
        arguments = [alone.pop(name) for name in ("q", "k", "v", "k_pool", "v_pool", "past_lengths")]
        wanted, k_pool, v_pool = attend_by_loops(*arguments, **alone, **ATTRIBUTES)
        VERIFY_ATTENTION.assert_agrees("o", found["o"][:, :, rows], wanted)
        np.testing.assert_array_equal(found["k_pool_out"][slot], k_pool[0])
        np.testing.assert_array_equal(found["v_pool_out"][slot], v_pool[0])
    np.testing.assert_array_equal(found["k_pool_out"][1], inputs["k_pool"][1])


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("counts", [[2, 3], [1, 1, 1], [0, 4, 0, 20], [18, 1]], ids=str)
@pytest.mark.parametrize("operator", ["VerifyAttention", "QkvAttention"])
def test_bodies_and_native_operators_agree_with_the_reference(operator, counts, sinks, tree):
    inputs, attributes = packed_case(counts, 3, sinks, tree), dict(ATTRIBUTES)
    contract, module = VERIFY_ATTENTION, verify_attention_body
    if operator == "QkvAttention":
        contract, module, inputs = QKV_ATTENTION, qkv_attention, to_qkv(inputs, 5)
        attributes |= {"heads": HEADS, "kv_heads": KV_HEADS}
    wanted = contract.reference(inputs, attributes)
    for found in (by_body(contract, module, inputs, attributes), run_native(contract, inputs, attributes, threads=2)):
        for name, value in wanted.items():
            contract.assert_agrees(name, found[name], value)


@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any),
    window=st.sampled_from([-1, 7, 140]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=20)
def test_a_sequence_is_the_same_bits_alone_and_packed(counts, window, seed):
    inputs = to_qkv(packed_case(counts, seed, rows=300), seed)
    attributes = {"scale": 0.3, "window": window, "heads": HEADS, "kv_heads": KV_HEADS}
    together = run_native(QKV_ATTENTION, inputs, attributes, threads=2)
    for slot, count in enumerate(counts):
        if count == 0:
            np.testing.assert_array_equal(together["k_pool_out"][slot], inputs["k_pool"][slot])
            continue
        alone, rows = one_sequence(inputs, slot)
        found = run_native(QKV_ATTENTION, alone, attributes)
        np.testing.assert_array_equal(found["o"][0], together["o"][0, rows])
        np.testing.assert_array_equal(found["v_pool_out"][0], together["v_pool_out"][slot])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_offsets": np.array([0, 3, 4], np.int32)}, "from 0 to the rows"),
        ({"row_offsets": np.array([0, 6, 5], np.int32)}, "must not fall"),
        ({"row_offsets": np.array([0, 5], np.int32)}, "slots"),
        ({"past_lengths": np.array([0, 169], np.int32)}, "within the pool"),
    ],
    ids=["short", "falling", "slots", "pool"],
)
def test_wrong_offsets_are_refused(change, message):
    inputs = packed_case([3, 2], 7)
    session = session_of(VERIFY_ATTENTION, inputs, {})
    with pytest.raises(Exception, match=message):
        session.run(None, inputs | change)
