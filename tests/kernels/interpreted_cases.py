"""Triton kernels against their contracts' references in Triton's interpreter; run by test_triton_interpreted.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton_launch

from dsc.kernels.kv_journal import KV_JOURNAL
from dsc.kernels.markov_walk import MARKOV_WALK
from dsc.kernels.verify_attention import VERIFY_ATTENTION
from dsc.kernels.verify_attention_int8 import VERIFY_ATTENTION_INT8

DTYPES = [("float32", torch.float32), ("float16", torch.float16)]
# name, axes, options left in, attributes, tile, parts
ATTENTION = [
    ("odd", {"B": 3, "Hq": 6, "Hkv": 2, "S": 5, "D": 24, "M": 37}, ("sinks", "tree_mask"), {}, (16, 16), 1),
    ("split", {"B": 2, "Hq": 6, "Hkv": 2, "S": 3, "D": 24, "M": 67}, ("sinks",), {}, (16, 16), 3),
    ("many tiles", {"B": 2, "Hq": 10, "Hkv": 2, "S": 7, "D": 16, "M": 40}, (), {}, (16, 32), 1),
    ("one row", {"B": 3, "Hq": 3, "Hkv": 1, "S": 1, "D": 80, "M": 19}, (), {"window": 4}, (16, 16), 2),
    ("window", {"B": 2, "Hq": 4, "Hkv": 2, "S": 5, "D": 16, "M": 70}, ("tree_mask",), {"window": 9}, (16, 16), 3),
    ("softcap", {"B": 2, "Hq": 4, "Hkv": 4, "S": 4, "D": 16, "M": 33}, (), {"softcap": 3.0, "scale": 0.9}, (16, 16), 1),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d[0])
@pytest.mark.parametrize("quantised", [False, True], ids=["float pool", "int8 pool"])
@pytest.mark.parametrize("case", ATTENTION, ids=lambda c: c[0])
def test_attention_equals_its_reference(case, quantised, dtype):
    _, axes, options, attributes, tile, parts = case
    contract = VERIFY_ATTENTION_INT8 if quantised else VERIFY_ATTENTION
    inputs = contract.make_inputs(axes, 7)
    inputs = {n: a for n, a in inputs.items() if n not in ("sinks", "tree_mask") or n in options}
    if dtype[0] == "float16":
        halved = ("q", "k", "v") if quantised else ("q", "k", "v", "k_pool", "v_pool")
        inputs |= {n: inputs[n].astype(np.float16).astype(np.float32) for n in halved}
    wanted = contract.reference(inputs, attributes)
    found = triton_launch.attention(inputs, attributes, tile=tile, parts=parts, dtype=dtype[1])
    for name in wanted:
        contract.assert_agrees(name, found[name].astype(wanted[name].dtype), wanted[name], dtype[0])


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("axes", [dict(MARKOV_WALK.example), {"B": 1, "n": 1, "k": 1}, {"B": 2, "n": 15, "k": 16}])
def test_markov_walk_equals_its_reference(axes, temperature):
    inputs = MARKOV_WALK.make_inputs(axes, 3)
    wanted = MARKOV_WALK.reference(inputs, {"temperature": temperature})
    found = triton_launch.markov_walk(inputs, temperature)
    for name in wanted:
        MARKOV_WALK.assert_agrees(name, found[name], wanted[name])


def test_commit_moves_overlapping_rows_as_one_step():
    rng = np.random.default_rng(1)
    pools = [rng.standard_normal((3, 2, 19, 12), dtype=np.float32) for _ in range(3)]
    past = np.array([0, 4, 9], np.int32)
    path = np.array([[0, 1, 2, 3, 4], [0, 2, 3, 5, 7], [1, 3, 4, 4, 4]], np.int32)
    counts = np.array([5, 5, 2], np.int32)
    wanted = [pool.copy() for pool in pools]
    for pool, source in zip(wanted, pools, strict=True):
        for b, count in enumerate(counts):
            pool[b, :, past[b] : past[b] + count] = source[b][:, past[b] + path[b, :count]]
    for found, pool in zip(triton_launch.kv_commit(pools, past, path, counts), wanted, strict=True):
        np.testing.assert_array_equal(found, pool)


@pytest.mark.parametrize("erase", [0, 1])
@pytest.mark.parametrize("seed", [0, 1])
def test_rollback_replays_the_journal_in_any_order(seed, erase):
    inputs = KV_JOURNAL.make_inputs(KV_JOURNAL.example, seed)
    wanted = KV_JOURNAL.reference(inputs, {"erase": erase})
    pools = [inputs["pool"], inputs["pool"] + 1]
    lengths, kept = triton_launch.kv_rollback(pools, inputs["lengths"], inputs["journal"], bool(erase))
    KV_JOURNAL.assert_agrees("lengths_out", lengths, wanted["lengths_out"])
    np.testing.assert_array_equal(kept[0], wanted["pool_out"])
    erased = wanted["pool_out"] != inputs["pool"]
    np.testing.assert_array_equal(kept[1], np.where(erased, 0, inputs["pool"] + 1))
