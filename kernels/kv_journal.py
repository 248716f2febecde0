"""`KvJournal`: undo rejected rows by replaying a journal of appended ranges (incremental state rollback)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dsc.kernels.contract import Array, Axes, KernelContract, TensorRole


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """Each journal entry (slot, start, end) undoes the rows [start, end) of a slot.

    A slot's length becomes the least start among its entries, if that is less, in whatever order they are
    replayed; rows past the length are never read, so nothing is cleared unless `erase` is set.
    """
    lengths, pool = inputs["lengths"].copy(), inputs["pool"].copy()
    for slot, start, end in inputs["journal"]:
        lengths[slot] = min(lengths[slot], start)
        if attributes.get("erase", 0):
            pool[slot, :, start:end] = 0
    return {"lengths_out": lengths, "pool_out": pool}


def make_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """Entries in random order, several of one slot and none of others."""
    rng = np.random.default_rng(seed)
    b, m, e = axes["B"], axes["M"], axes["E"]
    start = rng.integers(0, m, e)
    end = np.minimum(start + rng.integers(1, 5, e), m)
    return {
        "journal": np.stack([rng.integers(0, max(b - 1, 1), e), start, end], axis=1).astype(np.int32),
        "lengths": rng.integers(0, m + 1, b).astype(np.int32),
        "pool": rng.standard_normal((b, axes["Hkv"], m, axes["D"]), dtype=np.float32),
    }


_POOL = ("B", "Hkv", "M", "D")
KV_JOURNAL = KernelContract(
    name="KvJournal",
    axes={
        "B": "slots",
        "Hkv": "key and value heads",
        "M": "rows of the pool",
        "D": "head size",
        "E": "journal entries",
    },
    inputs=(
        TensorRole("journal", ("E", 3), "int32"),
        TensorRole("lengths", ("B",), "int32"),
        TensorRole("pool", _POOL),
    ),
    outputs=(TensorRole("lengths_out", ("B",), "int32"), TensorRole("pool_out", _POOL)),
    attributes={"erase": "1: zero the rows (secure rollback)"},
    reference=reference,
    make_inputs=make_inputs,
    nbytes=lambda axes: 16 * axes["E"],
    flops=lambda axes: 0,
    example={"B": 3, "Hkv": 2, "M": 17, "D": 12, "E": 5},
)
