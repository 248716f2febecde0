"""`SpeculativeVerify`: from a block's logits to how many drafts hold and which token follows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dsc.bundle_schema.errors import KernelError
from dsc.kernels.contract import Array, Axes, KernelContract, TensorRole
from dsc.kernels.speculative_verify_penalties import penalised_logits
from dsc.kernels.speculative_verify_rules import (
    LARGEST_UNIFORM,
    Verdict,
    block_rule,
    greedy_rule,
    target_distribution,
    token_rule,
)

if TYPE_CHECKING:
    import onnx_ir as ir

MODES = ("greedy", "deterministic", "rejection", "block")
ALL_HELD = 0
"""Cause of a round's end: every draft holds (or there was none), the next token is a bonus."""
REJECTED = 1
"""Cause of a round's end: a draft failed, the next token is its correction."""


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """Judge ``draft_lengths[b]`` drafts of each sequence b by the rule that `mode` names.

    greedy: the argmax of every row, nothing else. deterministic: drafts are point masses. rejection: drafts were
    sampled from q, dense [B, K, V] or, with `q_ids`, its support. block: the same, judged together. Rows past a
    sequence's length and drafts there are not looked at; the draw is the last column of `uniforms`. With `penalties`
    the logits are those of `penalised_logits`, in every mode.
    """
    mode = attributes.get("mode", "rejection")
    verdicts = [_verdict(inputs, mode, b) for b in range(len(inputs["draft_lengths"]))]
    accepted = np.array([verdict.accepted for verdict in verdicts], np.int32)
    causes = np.where(accepted < inputs["draft_lengths"], REJECTED, ALL_HELD)
    return {
        "n_accepted": accepted,
        "next_token": np.array([verdict.next_token for verdict in verdicts], np.int64),
        "cause": causes.astype(np.int32),
    }


def _verdict(inputs: Mapping[str, Array], mode: str, b: int) -> Verdict:
    length = int(inputs["draft_lengths"][b])
    logits, drafts = inputs["logits"][b, : length + 1], inputs["draft_ids"][b, :length].tolist()
    if "penalties" in inputs:
        n_prompt = int(inputs["prompt_lengths"][b])
        logits = penalised_logits(logits, drafts, inputs["history"][b], n_prompt, inputs["penalties"][b])
    if mode == "greedy":
        return greedy_rule(logits, drafts)
    settings = [inputs[name][b].item() for name in ("temperature", "top_k", "top_p", "min_p")]
    p = np.stack([target_distribution(row, *settings) for row in logits])
    vocab = logits.shape[1]
    q = point_masses(drafts, vocab) if mode == "deterministic" else dense_proposal(inputs, b, vocab)
    uniforms = np.minimum(inputs["uniforms"][b].astype(np.float64), LARGEST_UNIFORM)
    rule = block_rule if mode == "block" else token_rule
    return rule(p, q, drafts, uniforms)


def point_masses(drafts: Sequence[int], vocab: int) -> Array:
    """The proposals [n, V] of drafts that were not sampled; a token outside the vocabulary leaves a row empty."""
    masses = np.zeros((len(drafts), vocab))
    for row, token in zip(masses, drafts, strict=True):
        if 0 <= token < vocab:
            row[token] = 1
    return masses


def dense_proposal(inputs: Mapping[str, Array], b: int, vocab: int) -> Array:
    """The proposals q [K, V] of one sequence; probabilities of a token that `q_ids` names twice add up."""
    q: Array = inputs["q"][b].astype(np.float64)
    if "q_ids" not in inputs:
        return q
    dense = np.zeros((len(q), vocab))
    np.add.at(dense, (np.arange(len(q))[:, None], inputs["q_ids"][b]), q)
    return dense


def make_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """Ragged drafts, sampled from a q that is near the target so that drafts both hold and fail.

    With W below V the proposal is sparse. Filters differ from sequence to sequence, and drafts past a length lie
    outside the vocabulary. With H, sequences have histories and penalties.
    """
    rng = np.random.default_rng(seed)
    b, k, v, w = (axes[name] for name in ("B", "K", "V", "W"))
    logits = 2 * rng.standard_normal((b, k + 1, v), dtype=np.float32)
    near = logits[:, :k] + rng.standard_normal((b, k, v), dtype=np.float32) / 2
    ids = np.sort(np.argsort(-near, axis=-1)[..., :w], axis=-1)
    weights = np.exp(np.take_along_axis(near, ids, -1)).astype(np.float64)
    q = weights / weights.sum(axis=-1, keepdims=True)
    at = (rng.random((b, k, 1)) > np.cumsum(q, axis=-1)).sum(axis=-1, keepdims=True).clip(0, w - 1)
    lengths = rng.integers(0, k + 1, b)
    lengths[0] = k
    drafts = np.where(np.arange(k) < lengths[:, None], np.take_along_axis(ids, at, -1)[..., 0], v + 7)
    sparse = {"q_ids": ids.astype(np.int32)} if w < v else {}
    histories = _make_histories(rng, b, v, axes["H"]) if "H" in axes else {}
    return {
        "logits": logits,
        "draft_ids": drafts.astype(np.int64),
        "draft_lengths": lengths.astype(np.int32),
        "uniforms": rng.random((b, k + 1), dtype=np.float32),
        "temperature": rng.uniform(0.6, 1.4, b).astype(np.float32),
        "top_k": np.resize([v // 2, 0, 3], b).astype(np.int32),
        "top_p": np.resize([0.93, 1.0, 0.81, 0.67], b).astype(np.float32),
        "min_p": np.resize([0.0, 0.013, 0.0, 0.04, 0.0], b).astype(np.float32),
        "q": q.astype(np.float32),
        **sparse,
        **histories,
    }


def _make_histories(rng: np.random.Generator, b: int, v: int, h: int) -> dict[str, Array]:
    """Histories of tokens that occur again and again, padded after their ends."""
    lengths = rng.integers(h // 2, h + 1, b)
    history = np.where(np.arange(h) < lengths[:, None], rng.integers(0, max(v // 3, 1), (b, h)), -1)
    penalties = np.stack([np.resize(values, b) for values in ([1.3, 1.0, 0.8], [0.4, 0.0], [0.25, -0.1, 0.0])], axis=1)
    return {
        "history": history.astype(np.int64),
        "prompt_lengths": rng.integers(0, lengths + 1).astype(np.int32),
        "penalties": penalties.astype(np.float32),
    }


def _nbytes(axes: Axes) -> int:
    b, k, v = (axes[name] for name in ("B", "K", "V"))
    return 4 * b * ((k + 1) * v + k * axes["W"])


def _flops(axes: Axes) -> int:
    return 6 * axes["B"] * (axes["K"] + 1) * axes["V"]


SPECULATIVE_VERIFY = KernelContract(
    name="SpeculativeVerify",
    axes={
        "B": "sequences",
        "K": "drafts of the longest block",
        "R": "rows of logits, K + 1",
        "V": "vocabulary",
        "W": "columns of q: V, or the tokens of a sparse proposal",
        "H": "tokens of the longest history",
    },
    inputs=(
        TensorRole("logits", ("B", "R", "V"), "float32"),
        TensorRole("draft_ids", ("B", "K"), "int64"),
        TensorRole("draft_lengths", ("B",), "int32"),
        TensorRole("uniforms", ("B", "R"), "float32", optional=True),
        TensorRole("temperature", ("B",), "float32", optional=True),
        TensorRole("top_k", ("B",), "int32", optional=True),
        TensorRole("top_p", ("B",), "float32", optional=True),
        TensorRole("min_p", ("B",), "float32", optional=True),
        TensorRole("q", ("B", "K", "W"), "float32", optional=True),
        TensorRole("q_ids", ("B", "K", "W"), "int32", optional=True),
        TensorRole("history", ("B", "H"), "int64", optional=True),
        TensorRole("prompt_lengths", ("B",), "int32", optional=True),
        TensorRole("penalties", ("B", 3), "float32", optional=True),
    ),
    outputs=(
        TensorRole("n_accepted", ("B",), "int32"),
        TensorRole("next_token", ("B",), "int64"),
        TensorRole("cause", ("B",), "int32"),
    ),
    attributes={"mode": ", ".join(MODES)},
    reference=reference,
    make_inputs=make_inputs,
    nbytes=_nbytes,
    flops=_flops,
    example={"B": 5, "K": 3, "R": 4, "V": 37, "W": 37, "H": 11},
)


PENALTY_INPUTS = ("history", "prompt_lengths", "penalties")


def input_names(mode: str, sparse: bool = False, penalties: bool = False) -> tuple[str, ...]:
    """The inputs that a node of this mode has, in order: greedy none of the sampling's, deterministic no q."""
    names = [role.name for role in SPECULATIVE_VERIFY.inputs]
    count = {"greedy": 3, "deterministic": 8}.get(mode, 10 if sparse else 9)
    return (*names[:count], *(PENALTY_INPUTS if penalties else ()))


def function_for(node: ir.Node) -> ir.Function:
    """The body that fits a node's mode and proposal; its overload names them.

    Raises:
        KernelError: there is no such mode, or an input that it needs is missing.
    """
    from dsc.kernels.speculative_verify_body import function_body

    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else ""
    where = f"SpeculativeVerify node {node.name!r}"
    if mode not in MODES:
        raise KernelError(where, f"one of the modes {', '.join(MODES)} is required, got {mode!r}")
    roles = [role.name for role in SPECULATIVE_VERIFY.inputs]
    given = {name for name, value in zip(roles, node.inputs, strict=False) if value is not None}
    sparse = mode in ("rejection", "block") and "q_ids" in given
    penalties = bool(given & set(PENALTY_INPUTS))
    for name in input_names(mode, sparse, penalties):
        if name not in given:
            raise KernelError(where, f"mode {mode}{' with penalties' if penalties else ''} requires the input {name}")
    function = function_body(mode, sparse, penalties)
    function.overload = "_".join([mode, *(["sparse"] if sparse else []), *(["penalties"] if penalties else [])])
    return function
