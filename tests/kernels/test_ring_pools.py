"""Pools that are rings: position p in row p mod M. What a window sees is as in a pool that keeps every row."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import by_body, to_qkv
from hypothesis import given, settings
from hypothesis import strategies as st
from native_operator import run_native, session_of

from dsc.kernels import qkv_attention, verify_attention, verify_attention_body
from dsc.kernels.qkv_attention import QKV_ATTENTION
from dsc.kernels.verify_attention import VERIFY_ATTENTION

HEADS, KV_HEADS, DIM, TILE = 6, 2, 20, 128
OPERATORS = {
    "VerifyAttention": (VERIFY_ATTENTION, verify_attention_body, {}),
    "QkvAttention": (QKV_ATTENTION, qkv_attention, {"heads": HEADS, "kv_heads": KV_HEADS}),
}


def long_case(pasts, counts, seed, packed=False, sinks=False, tree=False):
    """New rows of some sequences over pools with room for all their positions."""
    axes = {"B": len(pasts), "Hq": HEADS, "Hkv": KV_HEADS, "S": counts[0], "D": DIM, "M": max(pasts) + max(counts)}
    inputs = verify_attention.make_inputs(axes, seed)
    inputs["past_lengths"] = np.array(pasts, np.int32)
    if packed:
        rows = verify_attention.make_inputs(axes | {"B": 1, "S": sum(counts)}, seed + 1)
        inputs |= {name: rows[name] for name in ("q", "k", "v", "tree_mask")}
        inputs["row_offsets"] = np.cumsum([0, *counts], dtype=np.int32)
    dropped = {name for name, kept in (("sinks", sinks), ("tree_mask", tree)) if not kept}
    return {name: value for name, value in inputs.items() if name not in dropped}


def in_rings(inputs, n_rows, unwritten=0.0):
    """The same with each sequence's newest rows in rings, where a forward would have left them."""
    rings = {}
    for name in ("k_pool", "v_pool"):
        pool = inputs[name]
        ring = np.full((*pool.shape[:2], n_rows, pool.shape[3]), unwritten, np.float32)
        for b, past in enumerate(inputs["past_lengths"]):
            positions = np.arange(past)[-n_rows:]
            ring[b][:, positions % n_rows] = pool[b][:, positions]
        rings[name] = ring
    return inputs | rings


def assert_new_rows_are_in_place(found, wanted, inputs, counts):
    for name in ("k_pool_out", "v_pool_out"):
        for b, (past, count) in enumerate(zip(inputs["past_lengths"], counts, strict=True)):
            positions = np.arange(past, past + count)
            places = positions % found[name].shape[2]
            np.testing.assert_array_equal(found[name][b][:, places], wanted[name][b][:, positions])


@given(
    past=st.integers(0, 700),
    rows=st.integers(1, 40),
    window=st.sampled_from([1, 5, 128, 200]),
    spare=st.integers(0, 200),
    sinks=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=30)
def test_native_attention_over_a_ring_has_the_bits_of_a_long_pool(past, rows, window, spare, sinks, seed):
    long = long_case([past], [rows], seed, sinks=sinks)
    n_rows = -(-(window - 1 + rows + spare) // TILE) * TILE
    attributes = {"scale": 0.3, "window": window}
    wanted = run_native(VERIFY_ATTENTION, long, attributes)
    # In a ring that is not full yet nothing has been written where nothing is: it must not be read either.
    found = run_native(VERIFY_ATTENTION, in_rings(long, n_rows, np.nan), attributes, threads=2)
    np.testing.assert_array_equal(found["o"], wanted["o"])
    assert_new_rows_are_in_place(found, wanted, long, [rows])


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_reference_body_and_native_operator_agree_with_a_long_pool(operator, packed, sinks, tree):
    contract, module, attributes = OPERATORS[operator]
    attributes = attributes | {"scale": 0.3, "window": 60, "softcap": 4.0}
    counts = [3, 0, 1, 20] if packed else [4, 4, 4, 4]
    long = long_case([600, 250, 0, 117], counts, 3, packed, sinks, tree)
    rings = in_rings(long, TILE)
    if operator == "QkvAttention":
        long, rings = to_qkv(long, 5), to_qkv(rings, 5)
    wanted = contract.reference(long, attributes)
    for found in (
        contract.reference(rings, attributes),
        by_body(contract, module, rings, attributes),
        run_native(contract, rings, attributes, threads=2),
    ):
        contract.assert_agrees("o", found["o"], wanted["o"])
        assert_new_rows_are_in_place(found, wanted, long, counts)


@given(seed=st.integers(0, 2**32 - 1), rounds=st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), max_size=60))
@settings(max_examples=10)
def test_a_ring_as_small_as_planned_survives_any_rounds(seed, rounds):
    """Rows are drafted and rejected as they come: a ring of window and slack gives the bits of a long pool."""
    window, n_rows, attributes = 119, TILE, {"scale": 0.3, "window": 119}  # 119 + 9 rows
    rng = np.random.default_rng(seed)
    pools = {name: np.full((1, KV_HEADS, 700, DIM), np.nan, np.float32) for name in ("k_pool", "v_pool")}
    rings = {name: np.full((1, KV_HEADS, n_rows, DIM), np.nan, np.float32) for name in pools}
    assert window + 9 <= n_rows
    past = 0
    for rows, share in rounds:
        new = {
            name: rng.standard_normal((1, n, rows, DIM), np.float32) for name, n in zip("qkv", (6, 2, 2), strict=True)
        }
        new["past_lengths"] = np.array([past], np.int32)
        long = run_native(VERIFY_ATTENTION, new | pools, attributes)
        ring = run_native(VERIFY_ATTENTION, new | rings, attributes)
        np.testing.assert_array_equal(ring["o"], long["o"])
        pools = {name: long[f"{name}_out"] for name in pools}
        rings = {name: ring[f"{name}_out"] for name in pools}
        past += max(1, round(share * rows))


@pytest.mark.parametrize(
    ("window", "n_rows", "rows"), [(-1, 128, 4), (126, 128, 4), (20, 100, 4), (0, 128, 4)], ids=str
)
def test_a_pool_that_cannot_be_a_ring_is_refused(window, n_rows, rows):
    inputs = in_rings(long_case([300], [rows], 1), n_rows)
    session = session_of(VERIFY_ATTENTION, inputs, {"window": window})
    with pytest.raises(Exception, match="the window within a ring"):
        session.run(None, inputs)
    fits = inputs | {"past_lengths": np.array([n_rows - rows], np.int32)}
    assert np.isfinite(session.run(["o"], fits)[0]).all() == (window != 0)
