"""`VerifyAttention`: the new rows of each sequence attend to its KV pool and are appended to it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from dsc.kernels.contract import Array, Axes, KernelContract, TensorRole


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """Attention of q [B, Hq, S, D] over the pools after k, v [B, Hkv, S, D] were written at `past_lengths`.

    Row s of sequence b has position ``p = past_lengths[b] + s`` and sees key j when ``p - window < j <= p``
    (no lower bound when window is -1) and, with a tree mask, when its own row of the mask says so for the
    new rows. Scores are ``softcap * tanh(scale * q k / softcap)`` when softcap is not 0. A sink is one more
    score without a value.

    Position p lies in row p mod M of its pool, so a pool may be a ring where `window` leaves old rows unseen:
    where ``past_lengths[b] + S`` is over M, ``window - 1 + S`` must not be. Kernels may ask for whole tiles of
    128 rows then.

    With `row_offsets` [P + 1] the S rows of a batch of 1 are packed: rows ``row_offsets[i] .. row_offsets[i + 1] - 1``,
    perhaps none, belong to the sequence in slot i of P; pools and `past_lengths` then have P slots in place of B
    (FlashAttention's ``cu_seqlens``).
    """
    if "row_offsets" in inputs:
        return _packed_reference(inputs, attributes)
    q, k, v = (inputs[name].astype(np.float64) for name in ("q", "k", "v"))
    k_pool, v_pool = inputs["k_pool"].copy(), inputs["v_pool"].copy()
    past = inputs["past_lengths"]
    scale = attributes.get("scale", 1.0 / np.sqrt(q.shape[-1]))
    window, softcap = attributes.get("window", -1), attributes.get("softcap", 0.0)
    n_batch, n_heads, n_rows, _ = q.shape
    group = n_heads // k.shape[1]
    out = np.zeros(q.shape)
    for b in range(n_batch):
        end = int(past[b]) + n_rows
        places = np.arange(end) % k_pool.shape[2]
        k_pool[b, :, places[past[b] :]] = k[b].swapaxes(0, 1)
        v_pool[b, :, places[past[b] :]] = v[b].swapaxes(0, 1)
        visible = visible_keys(int(past[b]), n_rows, window, _tree_rows(inputs, b))  # [S, end]
        for head in range(n_heads):
            keys, values = k_pool[b, head // group, places], v_pool[b, head // group, places]  # older ones unseen
            scores = scale * (q[b, head] @ keys.T.astype(np.float64))
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            scores[~visible] = -np.inf
            if "sinks" in inputs:
                sinks = np.full((n_rows, 1), inputs["sinks"][head])
                scores = np.concatenate([scores, sinks], axis=1)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[b, head] = weights[:, :end] @ values
    return {"o": out.astype(inputs["q"].dtype), "k_pool_out": k_pool, "v_pool_out": v_pool}


def _packed_reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """Sequence by sequence."""
    names = {"o": "q", "k_pool_out": "k_pool", "v_pool_out": "v_pool"}
    outputs = {name: np.array(inputs[source]) for name, source in names.items()}
    offsets = inputs["row_offsets"]
    for slot, (first, last) in enumerate(pairwise(offsets)):
        rows, own = slice(first, last), slice(slot, slot + 1)
        one = {name: inputs[name][:, :, rows] for name in ("q", "k", "v")}
        one |= {name: inputs[name][own] for name in ("k_pool", "v_pool", "past_lengths")}
        one |= {"sinks": inputs["sinks"]} if "sinks" in inputs else {}
        one |= {"tree_mask": inputs["tree_mask"][:, :, rows, rows]} if "tree_mask" in inputs else {}
        found = reference(one, attributes)
        outputs["o"][:, :, rows] = found["o"]
        outputs["k_pool_out"][own], outputs["v_pool_out"][own] = found["k_pool_out"], found["v_pool_out"]
    return outputs


def visible_keys(past: int, n_rows: int, window: int, tree: Array | None) -> Array:
    """Which of the ``past + n_rows`` keys each new row sees, bool [n_rows, past + n_rows]."""
    rows = past + np.arange(n_rows)[:, None]
    keys = np.arange(past + n_rows)[None, :]
    visible: Array = keys <= rows
    if window > 0:
        visible &= keys > rows - window
    if tree is not None:
        visible[:, past:] &= tree
    return visible


def _tree_rows(inputs: Mapping[str, Array], b: int) -> Array | None:
    return inputs["tree_mask"][b, 0] if "tree_mask" in inputs else None


def make_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """Ragged sequences over pools that hold garbage past their valid rows."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32)

    b, hq, hkv, s, d, m = (axes[name] for name in ("B", "Hq", "Hkv", "S", "D", "M"))
    return {
        "q": normal(b, hq, s, d),
        "k": normal(b, hkv, s, d),
        "v": normal(b, hkv, s, d),
        "k_pool": normal(b, hkv, m, d),
        "v_pool": normal(b, hkv, m, d),
        "past_lengths": rng.integers(0, m - s + 1, b).astype(np.int32),
        "sinks": normal(hq),
        "tree_mask": random_tree_mask(rng, b, s),
    }


def random_tree_mask(rng: np.random.Generator, n_batch: int, n_rows: int) -> Array:
    """Ancestor masks bool [B, 1, S, S] of random trees whose row 0 is the root."""
    mask = np.zeros((n_batch, 1, n_rows, n_rows), np.bool_)
    for b in range(n_batch):
        for row in range(n_rows):
            if row:
                mask[b, 0, row] = mask[b, 0, rng.integers(0, row)]
            mask[b, 0, row, row] = True
    return mask


def _nbytes(axes: Axes) -> int:
    rows = axes["B"] * axes["S"] * axes["D"]
    pool = 2 * axes["B"] * axes["Hkv"] * axes["M"] * axes["D"]
    return 4 * (pool + 2 * axes["Hq"] * rows + 4 * axes["Hkv"] * rows)


def _flops(axes: Axes) -> int:
    return 4 * axes["B"] * axes["Hq"] * axes["S"] * axes["M"] * axes["D"]


_POOL = ("B", "Hkv", "M", "D")
_NEW = ("B", "Hkv", "S", "D")

VERIFY_ATTENTION = KernelContract(
    name="VerifyAttention",
    axes={
        "B": "sequences",
        "Hq": "query heads",
        "Hkv": "key and value heads",
        "S": "new rows of each sequence",
        "D": "head size",
        "M": "rows of a pool",
        "P1": "slots of the pools, and 1",
    },
    inputs=(
        TensorRole("q", ("B", "Hq", "S", "D")),
        TensorRole("k", _NEW),
        TensorRole("v", _NEW),
        TensorRole("k_pool", _POOL),
        TensorRole("v_pool", _POOL),
        TensorRole("past_lengths", ("B",), "int32"),
        TensorRole("sinks", ("Hq",), "float32", optional=True),
        TensorRole("tree_mask", ("B", 1, "S", "S"), "bool", optional=True),
        TensorRole("row_offsets", ("P1",), "int32", optional=True),
    ),
    outputs=(
        TensorRole("o", ("B", "Hq", "S", "D")),
        TensorRole("k_pool_out", _POOL),
        TensorRole("v_pool_out", _POOL),
    ),
    attributes={
        "scale": "factor of the scores",
        "window": "keys that a row sees, its own included; -1: all before it",
        "softcap": "bound of the scores; 0: none",
    },
    reference=reference,
    make_inputs=make_inputs,
    nbytes=_nbytes,
    flops=_flops,
    example={"B": 3, "Hq": 6, "Hkv": 2, "S": 5, "D": 24, "M": 37, "P1": 4},
)
