"""What the GPU kernels are measured against: the same operators, written in torch without thought for the kernels.

Each takes a contract's inputs as tensors and computes its outputs; `KvCommit` and attention write into the pool, as a
decoding loop would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]


def attention(inputs: Tensors, attributes: Mapping[str, Any]) -> Callable[[], object]:
    """torch's scaled dot product attention over a pool whose sequences all have one length."""
    k_pool, v_pool = inputs["k_pool"].clone(), inputs["v_pool"].clone()
    attend = _attend(inputs, attributes)
    return lambda: attend(k_pool, v_pool)


def attention_int8(inputs: Tensors, attributes: Mapping[str, Any]) -> Callable[[], object]:
    """The same after the pool was widened, which torch has no other way to attend to."""
    scales = {side: inputs[f"{side}_scales"][:, None, None] for side in "kv"}
    attend = _attend(inputs, attributes)

    def run() -> object:
        return attend(*((inputs[f"{s}_pool"] * scales[s]).to(inputs["q"].dtype) for s in "kv"))

    return run


def _attend(inputs: Tensors, attributes: Mapping[str, Any]) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Append the new rows to a K and a V pool and attend to them.

    No mask is built: a bias that says "causal, aligned to the end" lets torch take its flash kernel.
    """
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    q, rows, past = inputs["q"], inputs["q"].shape[2], int(inputs["past_lengths"][0])
    bias = causal_lower_right(rows, past + rows) if rows > 1 else None
    scale = attributes.get("scale", q.shape[-1] ** -0.5)

    def attend(k_pool: torch.Tensor, v_pool: torch.Tensor) -> object:
        k_pool[:, :, past : past + rows] = inputs["k"]
        v_pool[:, :, past : past + rows] = inputs["v"]
        k, v = (pool[:, :, : past + rows] for pool in (k_pool, v_pool))
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=True)

    return attend


def greedy_verdict(inputs: Tensors, attributes: Mapping[str, Any]) -> Callable[[], object]:
    """argmax, the longest prefix that equals it, the token after it."""

    def run() -> object:
        best = inputs["logits"].argmax(-1)
        accepted = (best[:, :-1] == inputs["draft_ids"]).cumprod(1).sum(1, keepdim=True)
        return accepted, best.gather(1, accepted)

    return run


def rejection_verdict(inputs: Tensors, attributes: Mapping[str, Any]) -> Callable[[], object]:
    """softmax, the accept tests, and one draw by inverse cumulative sum from the residual or the bonus row."""
    import torch

    logits, drafts, q, uniforms = (inputs[name] for name in ("logits", "draft_ids", "q", "uniforms"))

    def run() -> object:
        p = (logits / inputs["temperature"][:, None, None]).softmax(-1)
        at = drafts[..., None]
        held = uniforms[:, :-1] * q.gather(2, at)[..., 0] < p[:, :-1].gather(2, at)[..., 0]
        accepted = held.cumprod(1).sum(1)
        taken = torch.cat([q, torch.zeros_like(q[:, :1])], 1)
        row = accepted[:, None, None].expand(-1, 1, p.shape[-1])
        mass = (p.gather(1, row) - taken.gather(1, row)).clamp(min=0)[:, 0].cumsum(-1)
        return accepted, torch.searchsorted(mass, uniforms[:, -1:] * mass[:, -1:], right=True)

    return run


def commit(inputs: Tensors, attributes: Mapping[str, Any]) -> Callable[[], object]:
    """A gather of the path's rows, then a copy to where they belong; all paths have one length."""
    import torch

    pool, path, past = inputs["pool"].clone(), inputs["path"].long(), inputs["past_lengths"].long()
    slots = torch.arange(pool.shape[0], device=pool.device)[:, None]
    target = past[:, None] + torch.arange(path.shape[1], device=pool.device)

    def run() -> object:
        pool[slots, :, target] = pool[slots, :, past[:, None] + path]
        return pool

    return run
