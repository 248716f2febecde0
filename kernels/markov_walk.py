"""`MarkovWalk`: choose one path through a block drafter's lattice of top-k candidates (DSpark, DFlash2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dsc.kernels.contract import Array, Axes, KernelContract, TensorRole


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """Walk position by position; each choice selects the row of scores of the next.

    Greedy (temperature 0) takes the best candidate, the first of equals, and its q is a point mass. Otherwise
    the choice is drawn by inverse cumulative sum from softmax(scores / temperature), which is the q that a
    rejection test must use.
    """
    ids, scores, uniforms = inputs["ids"], inputs["scores"], inputs["uniforms"]
    temperature = attributes.get("temperature", 0.0)
    n_batch, n_steps, width = ids.shape
    path = np.zeros((n_batch, n_steps), np.int64)
    q = np.zeros((n_batch, n_steps, width), np.float32)
    for b in range(n_batch):
        previous = 0
        for i in range(n_steps):
            row = scores[b, i, previous].astype(np.float64)
            if temperature > 0:
                weights = np.exp((row - row.max()) / temperature)
                probs = weights / weights.sum()
                above = np.flatnonzero(np.cumsum(probs) > uniforms[b, i])
                previous = int(above[0]) if above.size else int(np.flatnonzero(probs)[-1])
            else:
                previous = int(row.argmax())
                probs = np.eye(width)[previous]
            path[b, i], q[b, i] = ids[b, i, previous], probs
    return {"path": path, "q": q}


def make_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """Distinct candidates at every position and scores that favour none."""
    rng = np.random.default_rng(seed)
    b, n, k = axes["B"], axes["n"], axes["k"]
    ids = np.argsort(rng.random((b, n, 4 * k)), axis=-1)[..., :k]
    return {
        "ids": ids.astype(np.int64),
        "scores": rng.standard_normal((b, n, k, k), dtype=np.float32),
        "uniforms": rng.random((b, n), dtype=np.float32),
    }


MARKOV_WALK = KernelContract(
    name="MarkovWalk",
    axes={"B": "sequences", "n": "drafted positions", "k": "candidates of each position"},
    inputs=(
        TensorRole("ids", ("B", "n", "k"), "int64"),
        TensorRole("scores", ("B", "n", "k", "k"), "float32"),
        TensorRole("uniforms", ("B", "n"), "float32"),
    ),
    outputs=(TensorRole("path", ("B", "n"), "int64"), TensorRole("q", ("B", "n", "k"), "float32")),
    attributes={"temperature": "of the draft; 0 walks greedily"},
    reference=reference,
    make_inputs=make_inputs,
    nbytes=lambda axes: axes["B"] * axes["n"] * (8 * axes["k"] + 4 * axes["k"] + 12 + 4 * axes["k"]),
    flops=lambda axes: 6 * axes["B"] * axes["n"] * axes["k"],
    example={"B": 3, "n": 7, "k": 5},
)
