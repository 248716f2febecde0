"""GPU kernels run as the operators that they implement: a contract's inputs in, its outputs back, on torch tensors.

What tests and `dsc kernels bench` judge is the code of a bundle, started as the runtime starts it: variants are chosen
by `KernelChoice` and launched by the driver library. torch gives memory and the stream, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from dsc.bundle_schema.errors import KernelError
from dsc.kernels.contract import KernelContract
from dsc.runtime.device_kernels import (
    BoundLaunch,
    DeviceKernels,
    VerifyTail,
    attention_parts,
    bind_verify,
    verify_parts,
)

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
_PROPOSALS = {"greedy": "point_mass", "deterministic": "point_mass"}
_TALLEST_TILE = 128
_FILTERS = ("top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Operation:
    """An operator bound to its tensors.

    Attributes:
        launches: in order, on one stream.
        outputs: the contract's outputs by name, valid once the launches have run.
        held: every other tensor that the launches address.
    """

    launches: tuple[BoundLaunch, ...]
    outputs: dict[str, torch.Tensor]
    held: tuple[torch.Tensor, ...]

    def run(self, stream: int = 0) -> dict[str, torch.Tensor]:
        """Queue the launches and return the outputs; does not wait."""
        for launch in self.launches:
            launch.run(stream)
        return self.outputs


def bind_operator(
    kernels: DeviceKernels, contract: KernelContract, inputs: Tensors, attributes: Mapping[str, Any]
) -> Operation:
    """Bind the kernels of a contract to its inputs; in-place outputs get memory of their own.

    Args:
        kernels: of a bundle, on an open device.
        contract: which operator.
        inputs: contiguous tensors on that device, by the contract's names.
        attributes: the contract's.

    Raises:
        KernelError: the operator has no GPU kernel, or no variant serves the shapes.
    """
    if contract.name not in _BINDERS:
        raise KernelError(contract.name, "the operator has no GPU kernel", f"known: {', '.join(_BINDERS)}")
    return _BINDERS[contract.name](kernels, inputs, attributes)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bind_attention(kernels: DeviceKernels, inputs: Tensors, attributes: Mapping[str, Any]) -> Operation:
    import torch

    q, sinks, tree = inputs["q"], inputs.get("sinks"), inputs.get("tree_mask")
    pools = [inputs[name].clone() for name in ("k_pool", "v_pool")]
    (batch, q_heads, rows, size), kv_heads, pool_rows = q.shape, pools[0].shape[1], pools[0].shape[2]
    groups = q_heads // kv_heads
    cap = float(attributes.get("softcap", 0.0))
    programs = batch * kv_heads * ceil(groups * rows / _TALLEST_TILE)
    parts = attention_parts(programs, pool_rows, kernels.driver.device.multiprocessors)
    out, cells = torch.empty_like(q), batch * q_heads * rows * parts
    part, stat = (torch.empty(cells * width, dtype=torch.float32, device=q.device) for width in (size, 2))
    mask = None if tree is None else tree.to(torch.int8)
    scales = [inputs.get(f"{side}_scales") for side in "kv"]
    held = {"q_ptr": q, "k_ptr": inputs["k"], "v_ptr": inputs["v"], "k_pool_ptr": pools[0], "v_pool_ptr": pools[1]}
    held |= {"past_ptr": inputs["past_lengths"], "o_ptr": out, "part_ptr": part, "stat_ptr": stat}
    optional = {"sinks_ptr": sinks, "tree_ptr": mask, "k_scale_ptr": scales[0], "v_scale_ptr": scales[1]}
    held |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    values: dict[str, int | float] = dict.fromkeys(optional, 0) | {n: t.data_ptr() for n, t in held.items()}
    values |= {"S": rows, "pool_rows": pool_rows, "kv_heads": kv_heads, "groups": groups, "q_heads": q_heads}
    values |= {"window": attributes.get("window", -1), "has_sinks": int(sinks is not None), "parts": parts}
    values |= {"has_tree": int(tree is not None), "scale": float(attributes.get("scale", size**-0.5)), "cap": cap}
    axes: dict[str, int | str] = {"batch": batch, "kv_heads": kv_heads, "q_heads": q_heads, "rows": rows}
    axes |= {"packed_rows": groups * rows, "parts": parts, "head_size": size, "softcap": int(cap > 0)}
    axes |= {"dtype": _name(q), "pool_dtype": _name(pools[0])}
    launches = [kernels.bind("dspark_verify_head_tiled", axes, values)]
    if parts > 1:
        launches.append(kernels.bind("dspark_verify_join_parts", axes, values))
    outputs = {"o": out, "k_pool_out": pools[0], "v_pool_out": pools[1]}
    return Operation(tuple(launches), outputs, tuple(held.values()))


def _statistics(kernels: DeviceKernels, inputs: Tensors, sampled: bool) -> tuple[int, bool, dict[str, torch.Tensor]]:
    """(parts of a row, whether filters truncate, buffers by argument name) of the verdict's first launch."""
    import torch

    logits = inputs["logits"]
    batch, rows, vocab = logits.shape
    truncated = sampled and any(name in inputs for name in _FILTERS)
    parts = 1 if truncated else verify_parts(batch * rows, vocab, kernels.driver.device.multiprocessors)
    cells = batch * rows * parts
    made = {f"{name}_ptr": torch.empty(cells, dtype=torch.float32, device=logits.device) for name in ("best", "sum")}
    made["token_ptr"] = torch.empty(cells, dtype=torch.int32, device=logits.device)
    made["cut_ptr"] = torch.empty(batch * rows, dtype=torch.float32, device=logits.device)
    return parts, truncated, made


def _filters(inputs: Tensors) -> dict[str, torch.Tensor]:
    """The filters by argument name, neutral where they are not given."""
    import torch

    batch, device = inputs["logits"].shape[0], inputs["logits"].device
    neutral = {"top_k": (0, torch.int32), "top_p": (1, torch.float32), "min_p": (0, torch.float32)}
    return {
        f"{name}_ptr": inputs[name] if name in inputs else torch.full((batch,), value, dtype=kind, device=device)
        for name, (value, kind) in neutral.items()
    }


def _bind_verdict(kernels: DeviceKernels, inputs: Tensors, attributes: Mapping[str, Any]) -> Operation:
    import torch

    mode = str(attributes.get("mode", "rejection"))
    logits, sampled = inputs["logits"], mode != "greedy"
    batch, rows, vocab = logits.shape
    _, truncated, held = _statistics(kernels, inputs, sampled)
    held |= {"logits_ptr": logits, "drafts_ptr": inputs["draft_ids"], "lengths_ptr": inputs["draft_lengths"]}
    if sampled:
        held |= {f"{name}_ptr": inputs[name] for name in ("uniforms", "temperature", "q", "q_ids") if name in inputs}
        held |= _filters(inputs)
    tail = VerifyTail(
        batch,
        rows - 1,
        vocab,
        mode="sampled" if sampled else "greedy",
        proposal=_PROPOSALS.get(mode, "sparse" if "q_ids" in inputs else "dense"),
        rule="block" if mode == "block" else "token",
        truncated=truncated,
        width=inputs["q_ids"].shape[2] if "q_ids" in inputs else 0,
    )
    kinds = {"n_accepted": torch.int32, "next_token": torch.int64, "cause": torch.int32}
    outputs = {name: torch.empty(batch, dtype=kind, device=logits.device) for name, kind in kinds.items()}
    written = dict(zip(("accepted_ptr", "next_ptr", "cause_ptr"), outputs.values(), strict=True))
    addresses = {name: tensor.data_ptr() for name, tensor in (held | written).items()}
    return Operation(bind_verify(kernels, tail, addresses), outputs, tuple(held.values()))


def _bind_tree(kernels: DeviceKernels, inputs: Tensors, attributes: Mapping[str, Any]) -> Operation:
    import torch

    logits, sampled = inputs["logits"], attributes.get("mode", "sampled") != "greedy"
    batch, rows, vocab = logits.shape
    parts, truncated, held = _statistics(kernels, inputs, sampled)
    held |= {f"{name}_ptr": inputs[name] for name in ("logits", "tokens", "parents", "lengths")}
    if sampled:
        held |= {f"{name}_ptr": inputs[name] for name in ("uniforms", "temperature")} | _filters(inputs)
    outputs = {
        "path": torch.empty((batch, rows), dtype=torch.int32, device=logits.device),
        "n_accepted": torch.empty(batch, dtype=torch.int32, device=logits.device),
        "next_token": torch.empty(batch, dtype=torch.int64, device=logits.device),
    }
    written = dict(zip(("path_ptr", "accepted_ptr", "next_ptr"), outputs.values(), strict=True))
    values: dict[str, int | float] = dict.fromkeys(("uniforms_ptr", "temperature_ptr"), 0)
    values |= {name: tensor.data_ptr() for name, tensor in (held | written).items()}
    values |= {"vocab": vocab, "rows": rows, "nodes": rows - 1, "parts": parts}
    axes: dict[str, int | str] = {"batch": batch, "rows": rows, "vocab": vocab, "steps": rows - 1, "parts": parts}
    first: dict[str, int | str] = {"stage": "cutoff"} if truncated else {"stage": "stats", "sums": int(sampled)}
    second = {"stage": "accept_tree", "mode": "sampled" if sampled else "greedy", "truncated": int(truncated)}
    launches = [kernels.bind("dspark_speculative_verify", {**axes, **stage}, values) for stage in (first, second)]
    return Operation(tuple(launches), outputs, tuple(held.values()))


def _pool_axes(pool: torch.Tensor) -> tuple[dict[str, int | str], dict[str, int | float]]:
    """Axes and values that the kernels of a pool [B, Hkv, M, D] share."""
    batch, heads, rows, size = pool.shape
    axes: dict[str, int | str] = {"pools": 1, "batch": batch, "kv_heads": heads, "head_size": size}
    return axes | {"element_bits": 8 * pool.element_size()}, {"pool_rows": rows, "heads": heads}


def _bind_commit(kernels: DeviceKernels, inputs: Tensors, attributes: Mapping[str, Any]) -> Operation:
    import torch

    pool, path = inputs["pool"].clone(), inputs["path"]
    axes, values = _pool_axes(pool)
    held = {"pools_ptr": torch.tensor([pool.data_ptr()], device=pool.device), "past_ptr": inputs["past_lengths"]}
    held |= {"path_ptr": path, "count_ptr": inputs["counts"]}
    values |= {name: tensor.data_ptr() for name, tensor in held.items()} | {"steps": path.shape[1]}
    launch = kernels.bind("dspark_kv_commit", {**axes, "steps": path.shape[1]}, values)
    return Operation((launch,), {"pool_out": pool}, tuple(held.values()))


def _bind_rollback(kernels: DeviceKernels, inputs: Tensors, attributes: Mapping[str, Any]) -> Operation:
    import torch

    journal, lengths = inputs["journal"], inputs["lengths"].clone()
    outputs, held = {"lengths_out": lengths}, [journal]
    values: dict[str, int | float] = {"journal_ptr": journal.data_ptr(), "lengths_ptr": lengths.data_ptr()}
    values["entries"] = journal.shape[0]
    entries: dict[str, int | str] = {"entries": journal.shape[0]}
    launches = [kernels.bind("dspark_kv_rollback", {**entries, "stage": "replay"}, values)]
    if "pool" in inputs:
        outputs["pool_out"] = pool = inputs["pool"].clone()
        axes, sizes = _pool_axes(pool)
        if attributes.get("erase", 0):
            held.append(torch.tensor([pool.data_ptr()], device=pool.device))
            values |= {**sizes, "pools_ptr": held[-1].data_ptr()}
            launches.append(kernels.bind("dspark_kv_rollback", {**axes, **entries, "stage": "erase"}, values))
    return Operation(tuple(launches), outputs, tuple(held))


def _bind_walk(kernels: DeviceKernels, inputs: Tensors, attributes: Mapping[str, Any]) -> Operation:
    import torch

    ids, temperature = inputs["ids"], float(attributes.get("temperature", 0.0))
    batch, steps, width = ids.shape
    path = torch.empty((batch, steps), dtype=torch.int64, device=ids.device)
    q = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    held = {f"{name}_ptr": inputs[name] for name in ("ids", "scores", "uniforms")}
    values: dict[str, int | float] = {name: tensor.data_ptr() for name, tensor in held.items()}
    values |= {"path_ptr": path.data_ptr(), "q_ptr": q.data_ptr(), "n": steps, "k": width}
    values["inverse_temperature"] = 1.0 / temperature if temperature > 0 else 1.0
    axes: dict[str, int | str] = {"batch": batch, "k": width, "sampled": int(temperature > 0)}
    launch = kernels.bind("dspark_markov_walk", axes, values)
    return Operation((launch,), {"path": path, "q": q}, tuple(held.values()))


_BINDERS: dict[str, Callable[[DeviceKernels, Tensors, Mapping[str, Any]], Operation]] = {
    "KvCommit": _bind_commit,
    "KvRollback": _bind_rollback,
    "MarkovWalk": _bind_walk,
    "SpeculativeVerify": _bind_verdict,
    "TreeVerify": _bind_tree,
    "VerifyAttention": _bind_attention,
    "VerifyAttentionInt8": _bind_attention,
}
