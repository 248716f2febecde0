"""The verdict kernels against the oracle in Triton's interpreter; run by test_triton_interpreted.py."""

from __future__ import annotations

import numpy as np
import pytest
import triton_launch
import verify_oracle

V, K, B = 301, 4, 3
SAMPLING = {
    "temperature": {},
    "top_k": {"top_k": np.array([5, 0, 1], np.int32)},
    "top_p": {"top_p": np.array([0.9, 0.35, 1.0], np.float32)},
    "min_p": {"min_p": np.array([0.05, 0.0, 0.3], np.float32)},
    "all": {
        "top_k": np.array([40, 9, 300], np.int32),
        "top_p": np.array([0.95, 0.6, 0.8], np.float32),
        "min_p": np.array([0.02, 0.1, 0.0], np.float32),
    },
}


def make(seed: int, kind: str) -> dict[str, np.ndarray]:
    """Ragged drafts sampled from q, where q is close to p so that both outcomes occur."""
    rng = np.random.default_rng(seed)
    logits = (2.0 * rng.standard_normal((B, K + 1, V))).astype(np.float32)
    inputs = {"logits": logits, "draft_lengths": np.array([K, 2, 0], np.int32)}
    close = logits[:, :K] + 0.5 * rng.standard_normal((B, K, V))
    q = np.exp(close - close.max(-1, keepdims=True))
    if kind == "sparse":
        ids = np.argsort(-close, axis=-1)[..., :7]
        kept = np.take_along_axis(q, ids, -1)
        inputs |= {"q_ids": ids.astype(np.int32), "q": (kept / kept.sum(-1, keepdims=True)).astype(np.float32)}
    elif kind == "dense":
        inputs["q"] = (q / q.sum(-1, keepdims=True)).astype(np.float32)
    dense = dense_q(inputs, kind)
    if kind == "point mass":
        drafts = close.argmax(-1)
    else:
        drafts = np.array([[rng.choice(V, p=row / row.sum()) for row in rows] for rows in dense])
    return inputs | {
        "draft_ids": drafts.astype(np.int64),
        "uniforms": (0.8 * rng.random((B, K + 1))).astype(np.float32),
    }


def dense_q(inputs, kind):
    if kind == "dense":
        return inputs["q"].astype(np.float64)
    q = np.zeros((B, K, V))
    if kind == "sparse":
        np.put_along_axis(q, inputs["q_ids"].astype(np.int64), inputs["q"].astype(np.float64), -1)
    elif "draft_ids" in inputs:
        np.put_along_axis(q, inputs["draft_ids"][..., None], 1.0, -1)
    return q


def settings(name):
    chosen = {"temperature": np.array([0.7, 1.3, 1.0], np.float32), **SAMPLING[name]}
    rows = [{key: values[b].item() for key, values in chosen.items()} for b in range(B)]
    return chosen, rows


def expected(inputs, kind, rows, rule):
    q, verdicts = dense_q(inputs, kind), []
    for b, row in enumerate(rows):
        n = int(inputs["draft_lengths"][b])
        p = np.stack([verify_oracle.target_probs(x, **row) for x in inputs["logits"][b]])
        verdicts.append(rule(p, q[b], inputs["draft_ids"][b, :n], inputs["uniforms"][b]))
    return verdicts


@pytest.mark.parametrize(
    ("kind", "name"),
    [("dense", name) for name in SAMPLING]
    + [("point mass", "temperature"), ("sparse", "temperature"), ("sparse", "all")],
)
def test_token_rule(kind, name):
    chosen, rows = settings(name)
    for seed in (0, 1) if name == "temperature" else (0,):
        inputs = make(seed, kind)
        found = triton_launch.verify_chain(inputs, chosen, parts=2)
        wanted = expected(inputs, kind, rows, verify_oracle.token_rule)
        assert list(zip(found["n_accepted"], found["next_token"], strict=True)) == wanted


@pytest.mark.parametrize(("kind", "name"), [("dense", "temperature"), ("sparse", "temperature"), ("dense", "top_k")])
def test_block_rule(kind, name):
    chosen, rows = settings(name)
    for seed in (2, 3) if name == "temperature" else (2,):
        inputs = make(seed, kind)
        found = triton_launch.verify_chain(inputs, chosen, parts=3, block_rule=True)
        wanted = expected(inputs, kind, rows, verify_oracle.block_rule)
        assert list(zip(found["n_accepted"], found["next_token"], strict=True)) == wanted


@pytest.mark.parametrize("parts", [1, 3])
def test_greedy_takes_the_lowest_of_equal_logits(parts):
    inputs = make(4, "point mass")
    inputs["logits"] = np.round(inputs["logits"])  # many ties
    best = inputs["logits"].argmax(-1)
    inputs["draft_ids"] = best[:, :K].copy()
    inputs["draft_ids"][0, 2] += 1
    found = triton_launch.verify_chain(inputs, None, parts=parts)
    assert found["n_accepted"].tolist() == [2, 2, 0]
    assert found["next_token"].tolist() == [best[0, 2], best[1, 2], best[2, 0]]
    assert found["cause"].tolist() == [1, 0, 0]


@pytest.mark.parametrize("name", [None, "temperature", "all"])
def test_tree_of_point_masses(name):
    rng = np.random.default_rng(5)
    nodes = 6
    logits = (2.0 * rng.standard_normal((B, nodes + 1, V))).astype(np.float32)
    parents = np.array([[0, 0, 1, 1, 3, 2], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0]], np.int32)
    order = np.argsort(-logits, axis=-1)
    elder = np.array([[sum(row[:j] == row[j]) for j in range(nodes)] for row in parents])
    tokens = np.array([[order[b, parents[b, j], elder[b, j]] for j in range(nodes)] for b in range(B)], np.int32)
    chosen, rows = settings(name) if name else (None, [None] * B)
    for seed in range(4):
        uniforms = np.random.default_rng(seed).random((B, nodes + 1)).astype(np.float32)
        inputs = {"logits": logits, "tokens": tokens, "parents": parents, "uniforms": uniforms}
        found = triton_launch.verify_tree(inputs | {"lengths": np.array([6, 4, 6], np.int32)}, chosen)
        for b, row in enumerate(rows):
            n = (6, 4, 6)[b]
            if row is None:
                p = np.eye(V)[logits[b].argmax(-1)]
            else:
                p = np.stack([verify_oracle.target_probs(x, **row) for x in logits[b]])
            path, token = verify_oracle.tree_rule(p, tokens[b, :n], parents[b, :n], uniforms[b])
            assert found["path"][b, : len(path)].tolist() == path
            assert (found["n_accepted"][b], found["next_token"][b]) == (len(path) - 1, token)
