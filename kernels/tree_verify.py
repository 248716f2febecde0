"""`TreeVerify`: the verdict over a tree of drafts; its path is what `KvCommit` moves together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dsc.kernels.contract import Array, Axes, KernelContract, TensorRole
from dsc.kernels.speculative_verify_rules import LARGEST_UNIFORM, TreeVerdict, target_distribution, tree_rule

MODES = ("greedy", "sampled")


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """Walk down each sequence's tree by `tree_rule`; greedy, the target is a point mass on each row's argmax.

    Node j is row j + 1 of the logits, row 0 follows the text so far, and a parent's row comes before its children's.
    Nodes past a sequence's length are not looked at. The path holds the rows that stay, row 0 first, then zeros.
    """
    batch, rows, _ = inputs["logits"].shape
    verdicts = [_verdict(inputs, attributes.get("mode", "sampled"), b) for b in range(batch)]
    path = np.zeros((batch, rows), np.int32)
    for row, verdict in zip(path, verdicts, strict=True):
        row[: len(verdict.path)] = verdict.path
    return {
        "path": path,
        "n_accepted": np.array([len(verdict.path) - 1 for verdict in verdicts], np.int32),
        "next_token": np.array([verdict.next_token for verdict in verdicts], np.int64),
    }


def _verdict(inputs: Mapping[str, Array], mode: str, b: int) -> TreeVerdict:
    logits, n = inputs["logits"][b], int(inputs["lengths"][b])
    tokens, parents = inputs["tokens"][b, :n].tolist(), inputs["parents"][b, :n].tolist()
    if mode == "greedy":
        return tree_rule(np.eye(logits.shape[1])[logits.argmax(-1)], tokens, parents, np.zeros(len(logits)))
    settings = {name: inputs[name][b].item() for name in ("temperature", "top_k", "top_p", "min_p") if name in inputs}
    p = np.stack([target_distribution(row, **settings) for row in logits])
    return tree_rule(p, tokens, parents, np.minimum(inputs["uniforms"][b].astype(np.float64), LARGEST_UNIFORM))


def make_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """Random trees of likely tokens: siblings differ but for one that is tried twice; one token does not exist."""
    rng = np.random.default_rng(seed)
    b, n, v = axes["B"], axes["N"], axes["V"]
    logits = 2 * rng.standard_normal((b, n + 1, v), dtype=np.float32)
    parents = np.stack([[rng.integers(0, j + 1) for j in range(n)] for _ in range(b)])
    likely = np.argsort(-logits, axis=-1)
    tokens = np.zeros((b, n), np.int32)
    for tree, (row, up) in enumerate(zip(tokens, parents, strict=True)):
        for j in range(n):
            elder = int((up[:j] == up[j]).sum())
            row[j] = likely[tree, up[j], min(elder, v - 1)]
    if n > 2:
        parents[-1, 2], tokens[-1, 2] = parents[-1, 1], tokens[-1, 1]
        tokens[-1, 0] = v + 3
    lengths = rng.integers(0, n + 1, b)
    lengths[0] = lengths[-1] = n
    return {
        "logits": logits,
        "tokens": tokens,
        "parents": parents.astype(np.int32),
        "lengths": lengths.astype(np.int32),
        "uniforms": rng.random((b, n + 1), dtype=np.float32),
        "temperature": rng.uniform(0.6, 1.4, b).astype(np.float32),
        "top_k": np.resize([v // 2, 0, 3], b).astype(np.int32),
        "top_p": np.resize([0.93, 1.0, 0.81, 0.67], b).astype(np.float32),
        "min_p": np.resize([0.0, 0.013, 0.0, 0.04, 0.0], b).astype(np.float32),
    }


TREE_VERIFY = KernelContract(
    name="TreeVerify",
    axes={"B": "sequences", "N": "nodes of the largest tree", "R": "rows of logits, N + 1", "V": "vocabulary"},
    inputs=(
        TensorRole("logits", ("B", "R", "V"), "float32"),
        TensorRole("tokens", ("B", "N"), "int32"),
        TensorRole("parents", ("B", "N"), "int32"),
        TensorRole("lengths", ("B",), "int32"),
        TensorRole("uniforms", ("B", "R"), "float32", optional=True),
        TensorRole("temperature", ("B",), "float32", optional=True),
        TensorRole("top_k", ("B",), "int32", optional=True),
        TensorRole("top_p", ("B",), "float32", optional=True),
        TensorRole("min_p", ("B",), "float32", optional=True),
    ),
    outputs=(
        TensorRole("path", ("B", "R"), "int32"),
        TensorRole("n_accepted", ("B",), "int32"),
        TensorRole("next_token", ("B",), "int64"),
    ),
    attributes={"mode": ", ".join(MODES)},
    reference=reference,
    make_inputs=make_inputs,
    nbytes=lambda axes: 4 * axes["B"] * (axes["N"] + 1) * axes["V"],
    flops=lambda axes: 6 * axes["B"] * (axes["N"] + 1) * axes["V"],
    example={"B": 3, "N": 6, "R": 7, "V": 61},
)
