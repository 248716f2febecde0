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
