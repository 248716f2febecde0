"""KvCommit and KvRollback: bodies against references, references against moving rows one by one."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from run_operator import run_operator

from dsc.bundle_schema.errors import KernelError
from dsc.kernels.kv_ops import KV_COMMIT, KV_ROLLBACK, commit_body, function_for, rollback_body

SHAPES = [
    {"B": 3, "Hkv": 2, "M": 23, "D": 5, "P": 4},
    {"B": 1, "Hkv": 1, "M": 9, "D": 1, "P": 9},
    {"B": 4, "Hkv": 3, "M": 31, "D": 7, "P": 1},
    {"B": 2, "Hkv": 2, "M": 6, "D": 3, "P": 0},
]


def commit(inputs):
    names = [role.name for role in KV_COMMIT.inputs]
    return run_operator("KvCommit", inputs, names, ["pool_out"], {}, commit_body())["pool_out"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_commit_body_equals_the_reference(axes, seed):
    inputs = KV_COMMIT.make_inputs(axes, seed)
    wanted = KV_COMMIT.reference(inputs, {})["pool_out"]
    np.testing.assert_array_equal(commit(inputs), wanted)


def test_commit_moves_overlapping_rows_and_leaves_every_other_row():
    pool = np.arange(10, dtype=np.float32).reshape(1, 1, 10, 1)
    inputs = {
        "pool": pool,
        "past_lengths": np.array([5], np.int32),
        "path": np.array([[0, 2, 3, 4]], np.int32),  # row 7 is read for row 6 and overwritten by row 8
        "counts": np.array([4], np.int32),
    }
    wanted = [0, 1, 2, 3, 4, 5, 7, 8, 9, 9]
    assert KV_COMMIT.reference(inputs, {})["pool_out"].ravel().tolist() == wanted
    assert commit(inputs).ravel().tolist() == wanted


def test_commit_of_a_path_that_ends_with_the_pool():
    """The rows past the path that an implementation may round down to the last row must not win over it."""
    axes = {"B": 1, "Hkv": 1, "M": 6, "D": 2, "P": 5}
    inputs = KV_COMMIT.make_inputs(axes, 0)
    inputs |= {"past_lengths": np.array([4], np.int32), "path": np.array([[1, 0, 9, 9, 9]], np.int32)}
    inputs |= {"counts": np.array([2], np.int32)}
    np.testing.assert_array_equal(commit(inputs)[0, 0, 4:], inputs["pool"][0, 0, [5, 4]])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("erase", [0, 1])
@pytest.mark.parametrize("entries", [0, 1, 5, 12])
def test_rollback_body_equals_the_reference(entries, erase, seed):
    inputs = KV_ROLLBACK.make_inputs({**KV_ROLLBACK.example, "E": entries}, seed)
    names, outputs = [role.name for role in KV_ROLLBACK.inputs], ["lengths_out", "pool_out"]
    wanted = KV_ROLLBACK.reference(inputs, {"erase": erase})
    found = run_operator("KvRollback", inputs, names, outputs, {"erase": erase}, rollback_body(True, bool(erase)))
    for name in outputs:
        np.testing.assert_array_equal(found[name], wanted[name])
    undone = np.zeros_like(inputs["pool"], bool)
    for slot, start, end in inputs["journal"]:
        undone[slot, :, start:end] = True
    np.testing.assert_array_equal(found["pool_out"] == 0, undone & bool(erase))


def test_rollback_without_a_pool_changes_lengths_only_and_in_any_order():
    inputs = KV_ROLLBACK.make_inputs({**KV_ROLLBACK.example, "E": 9}, 4)
    del inputs["pool"]
    wanted = KV_ROLLBACK.reference(inputs, {})
    assert list(wanted) == ["lengths_out"]
    for journal in (inputs["journal"], inputs["journal"][::-1].copy()):
        given = {**inputs, "journal": journal}
        body = rollback_body(False, False)
        found = run_operator("KvRollback", given, ["lengths", "journal"], ["lengths_out"], {}, body)
        np.testing.assert_array_equal(found["lengths_out"], wanted["lengths_out"])
        np.testing.assert_array_equal(KV_ROLLBACK.reference(given, {})["lengths_out"], wanted["lengths_out"])


def test_function_for_fits_the_node():
    values = [ir.Value(name=name) for name in ("lengths", "journal", "pool")]

    def rollback(count, **attributes):
        return ir.node("KvRollback", values[:count], attributes=attributes, domain="ai.dspark", num_outputs=1)

    assert function_for(rollback(2)).overload == "lengths"
    assert function_for(rollback(3)).overload == "keep"
    assert function_for(rollback(3, erase=1)).overload == "erase"
    assert function_for(ir.node("KvCommit", values, domain="ai.dspark")).name == "KvCommit"
    with pytest.raises(KernelError, match="requires a pool"):
        function_for(rollback(2, erase=1))
