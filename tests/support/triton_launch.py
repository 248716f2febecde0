"""Launches Triton kernels in interpreter mode on NumPy inputs; import only with TRITON_INTERPRET=1 set."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dsc.kernels import (
    attention_triton,
    kv_ops_triton,
    markov_walk_triton,
)

Arrays = dict[str, Any]


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _t(array: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.to(dtype) if dtype else tensor.clone()


def attention(inputs: Arrays, attributes: Arrays, *, tile: tuple[int, int], parts: int, dtype: torch.dtype) -> Arrays:
    """`dspark_verify_head_tiled`, with its joining kernel when `parts` > 1."""
    quantised = "k_scales" in inputs
    q, k, v = (_t(inputs[n], dtype) for n in ("q", "k", "v"))
    pools = [_t(inputs[n], None if quantised else dtype) for n in ("k_pool", "v_pool")]
    (b, hq, s, d), (_, hkv, m, _) = q.shape, pools[0].shape
    groups, block_d = hq // hkv, _pow2(d)
    sinks = _t(inputs.get("sinks", np.zeros(hq)), torch.float32)
    tree = _t(inputs.get("tree_mask", np.zeros(1, bool)), torch.int8)
    scales = [_t(inputs.get(n, np.ones(hkv)), torch.float32) for n in ("k_scales", "v_scales")]
    out = torch.full_like(q, float("nan"))
    part, stat = torch.empty(b * hq * s * parts * d), torch.empty(b * hq * s * parts * 2)
    cap = attributes.get("softcap", 0.0)
    grid = (_cdiv(groups * s, tile[0]), b * hkv, parts)
    attention_triton.verify_head_tiled[grid](
        q, k, v, *pools, _t(inputs["past_lengths"]), sinks, tree, *scales, out, part, stat, s, m, hkv, groups,
        attributes.get("window", -1), int("sinks" in inputs), int("tree_mask" in inputs),
        attributes.get("scale", 1 / d**0.5), cap,
        HEAD_SIZE=d, BLOCK_D=block_d, BLOCK_M=tile[0], BLOCK_N=tile[1], BLOCK_S=_pow2(max(s, 16)),
        SOFTCAP=cap > 0, QUANTISED=quantised,
    )  # fmt: skip
    if parts > 1:
        attention_triton.join_parts[(b * hq * s,)](
            part, stat, sinks, out, parts, s, hq, int("sinks" in inputs),
            HEAD_SIZE=d, BLOCK_D=block_d, BLOCK_P=_pow2(parts),
        )  # fmt: skip
    return {"o": out.float().numpy(), "k_pool_out": pools[0].numpy(), "v_pool_out": pools[1].numpy()}


def markov_walk(inputs: Arrays, temperature: float) -> Arrays:
    """`dspark_markov_walk`."""
    b, n, k = inputs["ids"].shape
    path, q = torch.zeros((b, n), dtype=torch.int64), torch.zeros((b, n, k))
    markov_walk_triton.markov_walk[(b,)](
        _t(inputs["ids"]), _t(inputs["scores"]), _t(inputs["uniforms"]), path, q, n, k,
        1.0 / temperature if temperature else 1.0, BLOCK_K=_pow2(k), SAMPLED=temperature > 0,
    )  # fmt: skip
    return {"path": path.numpy(), "q": q.numpy()}


def _addresses(pools: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.int64)


def kv_commit(pools: list[Any], past: Any, path: Any, counts: Any) -> list[Any]:
    """`dspark_kv_commit` over several float32 pools of one shape."""
    held = [_t(pool) for pool in pools]
    b, heads, rows, d = held[0].shape
    from triton import language as tl

    kv_ops_triton.kv_commit[(len(held), b, heads)](
        _addresses(held), _t(past), _t(path), _t(counts), rows, heads, path.shape[1],
        HEAD_SIZE=d, BLOCK_D=_pow2(d), BLOCK_S=_pow2(path.shape[1]), ELEMENT=tl.float32,
    )  # fmt: skip
    return [pool.numpy() for pool in held]


def kv_rollback(pools: list[Any], lengths: Any, journal: Any, erase: bool) -> tuple[Any, list[Any]]:
    """`dspark_kv_rollback` and, on request, `dspark_kv_erase`."""
    from triton import language as tl

    held, left = [_t(pool) for pool in pools], _t(lengths)
    _, heads, rows, d = held[0].shape
    kv_ops_triton.kv_rollback[(_cdiv(len(journal), 4),)](_t(journal), left, len(journal), BLOCK=4)
    if erase:
        kv_ops_triton.kv_erase[(len(held), len(journal), heads)](
            _addresses(held), _t(journal), rows, heads, HEAD_SIZE=d, BLOCK_D=_pow2(d), BLOCK_S=4, ELEMENT=tl.float32
        )
    return left.numpy(), [pool.numpy() for pool in held]


def _row_statistics(logits: torch.Tensor, sampling: Arrays | None, parts: int) -> dict[str, torch.Tensor]:
    """First launch of the verdict: parts of every row, or the cut when something truncates."""
    from dsc.kernels import row_cutoff_triton, verify_greedy_triton

    b, rows, vocab = logits.shape
    n = b * rows
    truncated = bool(sampling) and any(name in sampling for name in ("top_k", "top_p", "min_p"))
    temperature = _t(sampling["temperature"] if sampling else np.ones(b, np.float32))
    found = {"best": torch.empty(n * parts), "sum": torch.empty(n * parts), "cut": torch.empty(n)}
    found |= {"token": torch.empty(n * parts, dtype=torch.int32), "temperature": temperature}
    if truncated:
        assert sampling is not None
        row_cutoff_triton.row_cutoff[(n,)](
            logits, temperature, _t(sampling.get("top_k", np.zeros(b, np.int32))),
            _t(sampling.get("top_p", np.ones(b, np.float32))), _t(sampling.get("min_p", np.zeros(b, np.float32))),
            found["best"], found["sum"], found["cut"], vocab, rows, BLOCK_V=256,
        )  # fmt: skip
    else:
        verify_greedy_triton.row_stats[(n, parts)](
            logits, temperature, found["best"], found["token"], found["sum"], vocab, rows,
            BLOCK_V=64, SUMS=sampling is not None,
        )  # fmt: skip
    return found | {"parts": torch.tensor(1 if truncated else parts), "truncated": torch.tensor(truncated)}


def verify_chain(inputs: Arrays, sampling: Arrays | None, *, parts: int = 1, block_rule: bool = False) -> Arrays:
    """`dspark_speculative_verify` over chains; `sampling` None is greedy, q comes as ``q`` and ``q_ids``."""
    from dsc.kernels import verify_greedy_triton, verify_sampled_triton

    logits = _t(inputs["logits"])
    b, rows, vocab = logits.shape
    stats = _row_statistics(logits, sampling, parts)
    parts = int(stats["parts"])
    outputs = {"n_accepted": torch.zeros(b, dtype=torch.int32), "next_token": torch.zeros(b, dtype=torch.int64)}
    cause = torch.zeros(b, dtype=torch.int32)
    drafts, lengths = _t(inputs["draft_ids"]), _t(inputs["draft_lengths"])
    if sampling is None:
        verify_greedy_triton.accept_greedy[(b,)](
            stats["best"], stats["token"], drafts, lengths, *outputs.values(), cause, rows - 1, parts, vocab,
            BLOCK_S=_pow2(rows), BLOCK_P=_pow2(parts),
        )  # fmt: skip
    else:
        mode = 2 if "q_ids" in inputs else 1 if "q" in inputs else 0
        verify_sampled_triton.accept_sampled[(b,)](
            logits, drafts, lengths, _t(inputs.get("q", np.zeros(1, np.float32))),
            _t(inputs.get("q_ids", np.zeros(1, np.int32))), _t(inputs["uniforms"]), stats["temperature"],
            stats["best"], stats["sum"], stats["cut"], *outputs.values(), cause, rows - 1, parts, vocab,
            inputs["q_ids"].shape[2] if mode == 2 else 0,
            BLOCK_V=128, TILES=_pow2(_cdiv(vocab, 128)), BLOCK_P=_pow2(parts), MODE=mode,
            TRUNCATED=bool(stats["truncated"]), BLOCK_RULE=block_rule,
        )  # fmt: skip
    return {name: tensor.numpy() for name, tensor in (outputs | {"cause": cause}).items()}


def verify_tree(inputs: Arrays, sampling: Arrays | None, *, parts: int = 1) -> Arrays:
    """`dspark_speculative_verify` over trees of point-mass drafts."""
    from dsc.kernels import verify_tree_triton

    logits = _t(inputs["logits"])
    b, rows, vocab = logits.shape
    stats = _row_statistics(logits, sampling, parts)
    path = torch.zeros((b, rows), dtype=torch.int32)
    accepted, token = torch.zeros(b, dtype=torch.int32), torch.zeros(b, dtype=torch.int64)
    parts = int(stats["parts"])
    verify_tree_triton.accept_tree[(b,)](
        logits, _t(inputs["tokens"]), _t(inputs["parents"]), _t(inputs["lengths"]), _t(inputs["uniforms"]),
        stats["temperature"], stats["best"], stats["token"], stats["sum"], stats["cut"], path, accepted, token,
        rows - 1, parts, vocab, BLOCK_V=128, TILES=_pow2(_cdiv(vocab, 128)), BLOCK_P=_pow2(parts),
        BLOCK_N=_pow2(rows), GREEDY=sampling is None, TRUNCATED=bool(stats["truncated"]),
    )  # fmt: skip
    return {"path": path.numpy(), "n_accepted": accepted.numpy(), "next_token": token.numpy()}
