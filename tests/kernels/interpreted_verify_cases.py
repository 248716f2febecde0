"""The verdict kernels against the contract's reference in the interpreter; run by test_triton_interpreted.py."""

from __future__ import annotations

import numpy as np
import pytest
import triton_launch

from dsc.kernels.speculative_verify import SPECULATIVE_VERIFY, reference
from dsc.kernels.speculative_verify_rules import target_distribution, tree_rule

FILTERS = ("top_k", "top_p", "min_p")
WIDE = {"B": 3, "K": 4, "R": 5, "V": 301, "W": 301}
NARROW = {"B": 5, "K": 3, "R": 4, "V": 37, "W": 37}
# mode, axes, whether filters truncate, parts of a row
CHAINS = [
    ("deterministic", WIDE, False, 2),
    ("deterministic", NARROW, True, 1),
    ("rejection", WIDE, False, 2),
    ("rejection", NARROW, True, 1),
    ("rejection", {**WIDE, "W": 7}, False, 3),
    ("rejection", {**NARROW, "W": 5}, True, 1),
    ("block", WIDE, False, 1),
    ("block", {**WIDE, "W": 7}, False, 2),
    ("block", NARROW, True, 1),
]


def judged(mode, axes, truncated, parts, seed):
    """(found, wanted) of one seeded case, with drafts past each length outside the vocabulary."""
    inputs = SPECULATIVE_VERIFY.make_inputs(axes, seed)
    if not truncated:
        inputs |= {"top_k": np.zeros_like(inputs["top_k"]), "top_p": np.ones_like(inputs["top_p"])}
        inputs |= {"min_p": np.zeros_like(inputs["min_p"])}
    if seed % 2:
        inputs["draft_ids"][0, 1] = axes["V"]
        inputs["uniforms"][1, -1] = 1.0
    wanted = reference(inputs, {"mode": mode})
    sampling = {name: inputs[name] for name in ("temperature", *(FILTERS if truncated else ()))}
    if mode == "deterministic":
        inputs = {name: array for name, array in inputs.items() if name not in ("q", "q_ids")}
    return triton_launch.verify_chain(inputs, sampling, parts=parts, block_rule=mode == "block"), wanted


@pytest.mark.parametrize(("mode", "axes", "truncated", "parts"), CHAINS)
def test_sampled_verdict_equals_the_reference(mode, axes, truncated, parts):
    # The search of a cut costs the interpreter seconds a case, so truncated rows get one seed.
    for seed in (1,) if truncated else (0, 1):
        found, wanted = judged(mode, axes, truncated, parts, seed)
        for name in wanted:
            SPECULATIVE_VERIFY.assert_agrees(name, found[name], wanted[name])


@pytest.mark.parametrize("parts", [1, 3])
def test_greedy_verdict_takes_the_lowest_of_equal_logits(parts):
    inputs = SPECULATIVE_VERIFY.make_inputs(WIDE, 4)
    inputs["logits"] = np.round(inputs["logits"])  # many ties
    inputs["draft_ids"] = inputs["logits"].argmax(-1)[:, :-1].copy()
    inputs["draft_ids"][0, 2] += 1
    wanted = reference(inputs, {"mode": "greedy"})
    found = triton_launch.verify_chain(inputs, None, parts=parts)
    assert wanted["n_accepted"][0] == 2
    for name in wanted:
        SPECULATIVE_VERIFY.assert_agrees(name, found[name], wanted[name])


@pytest.mark.parametrize("mode", ["greedy", "sampled", "truncated"])
def test_verdict_over_a_tree_equals_the_reference(mode):
    rng = np.random.default_rng(5)
    batch, nodes, vocab = 3, 6, 301 if mode != "truncated" else 61
    logits = (2.0 * rng.standard_normal((batch, nodes + 1, vocab))).astype(np.float32)
    parents = np.array([[0, 0, 1, 1, 3, 2], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0]], np.int32)
    order = np.argsort(-logits, axis=-1)
    elder = np.array([[sum(row[:j] == row[j]) for j in range(nodes)] for row in parents])
    tokens = np.array([[order[b, parents[b, j], elder[b, j]] for j in range(nodes)] for b in range(batch)], np.int32)
    tokens[2, 3] = tokens[2, 1]  # tried twice
    tokens[2, 4] = vocab + 3
    lengths = np.array([6, 4, 6], np.int32)
    temperature = np.array([0.7, 1.3, 1.0], np.float32)
    sampling = {"temperature": temperature}
    if mode == "truncated":
        sampling |= {"top_k": np.array([9, 0, 20], np.int32), "top_p": np.array([0.9, 0.8, 1], np.float32)}
    settings = [{name: values[b].item() for name, values in sampling.items()} for b in range(batch)]
    for seed in range(1 if mode == "truncated" else 4):
        uniforms = np.random.default_rng(seed).random((batch, nodes + 1)).astype(np.float32)
        inputs = {"logits": logits, "tokens": tokens, "parents": parents, "uniforms": uniforms, "lengths": lengths}
        found = triton_launch.verify_tree(inputs, None if mode == "greedy" else sampling)
        for b, n in enumerate(lengths):
            p = np.eye(vocab)[logits[b].argmax(-1)]
            if mode != "greedy":
                p = np.stack([target_distribution(row, **settings[b]) for row in logits[b]])
            wanted = tree_rule(p, tokens[b, :n].tolist(), parents[b, :n].tolist(), uniforms[b])
            assert tuple(found["path"][b, : len(wanted.path)]) == wanted.path
            assert (found["n_accepted"][b], found["next_token"][b]) == (len(wanted.path) - 1, wanted.next_token)
