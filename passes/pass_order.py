"""Which passes run, in which order: once for what a graph says and weighs, once a set of kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import onnx_ir as ir

from dsc.bundle_schema.errors import RequestError
from dsc.passes.base import GraphPass
from dsc.passes.block_quantisation import BlockWeights
from dsc.passes.graph_edit import DSPARK, attribute, input_at, is_op
from dsc.passes.pipeline import parse_pipeline
from dsc.passes.quantize_embedding import QuantizeEmbeddingPass
from dsc.passes.quantize_weights import QuantizeWeightsPass, head_weight

Kernels = Literal["ort", "native", "cuda", "cuda_native"]
Precision = Literal["keep", "fp32", "fp16", "bf16", "int8", "int4"]

NATIVE_BLOCK = 32
"""Weights a scale in the native kernels' matrices."""

_LONGEST_ROTARY_TABLE = 1 << 16
"""Positions. A longer table costs more memory than the nodes it replaces cost time."""

_ROW_OFFSETS = 8  # input of VerifyAttention
_WIDTHS: dict[str, Literal[4, 8]] = {"int4": 4, "int8": 8, "keep": 8}
_HALVES = {"fp16": "to-float16", "bf16": "to-bfloat16"}


def shared_passes(
    precision: Precision,
    *,
    block_weights: Mapping[str, BlockWeights] | None = None,
    head_precision: str | None = None,
    exclude: Sequence[str] = (),
    block: int = NATIVE_BLOCK,
) -> tuple[GraphPass, ...]:
    """Passes whose result every set of kernels starts from, so that their graphs have the same weights.

    Args:
        precision: of the matrices; ``keep`` takes `block_weights` as they are and rounds other matrices to int8.
        block_weights: matrices that are blocks already, by initializer name; they are never rounded again.
        head_precision: int4, int8 or fp32 for the matrix that makes the logits; int8 when None.
        exclude: patterns of matrices that keep their floats.
        block: weights a scale: 32, 64 or 128.

    Raises:
        RequestError: `block` or `head_precision` is none of these.
    """
    quantised = precision in _WIDTHS
    quantisation = _quantisation(precision, block_weights, head_precision, exclude, block) if quantised else ()
    return (
        # what the graph says
        *parse_pipeline("fold-constants,fuse-rms-norm,select-logit-rows,eliminate-common-subexpressions"),
        # what its weights are
        *quantisation,
        *parse_pipeline("" if precision in _HALVES else "weights-by-rows,merge-qkv,merge-gate-up"),
        # what no kernel set has kernels of its own for
        *parse_pipeline("lower-experts,fuse-skip-norm,remove-unused"),
    )


def layout_passes(kernel_sets: Collection[Kernels], precision: Precision = "fp32") -> tuple[GraphPass, ...]:
    """Passes after the shared ones: how matrices lie in a bundle that is for all of these sets of kernels.

    The native kernels read sixteen columns of quantised ones at once, and floats from 16 bits that are worth the same;
    onnxruntime's on the CPU undo both, as a rule when a graph is opened. Half precision starts from the floats.
    """
    if "native" not in kernel_sets:
        return ()
    halves = precision in _HALVES or any(kernels.startswith("cuda") for kernels in kernel_sets)
    return parse_pipeline("interleave-columns" if halves else "interleave-columns,weights-in-bfloat16,weights-in-int16")


def kernel_passes(kernels: Kernels, precision: Precision = "fp32", max_positions: int = 8192) -> tuple[GraphPass, ...]:
    """Passes that choose the operators of one set of kernels.

    Args:
        kernels: ``ort``: those of onnxruntime on the CPU; ``cuda``: those of its GPU provider, in half precision;
            ``native``: the project's own attention, products and activations, whose function bodies serve where its
            library is absent; ``cuda_native``: as ``cuda``, with attention left to the bundle's compiled kernels.
        max_positions: positions that the runtime will ever use.
    """
    rotary = f"fold_rotary={max_positions <= _LONGEST_ROTARY_TABLE},max_positions={max_positions}"
    attention = f"lower-attention{{{rotary}}}"
    operators = {
        "ort": f"{attention},separate-columns,lower-block-matmul",
        "native": "fuse-qkv-attention,fuse-swiglu,fuse-dense-matmul,fuse-matmul-skip-norm,pack-rows,ring-pools",
        "cuda": f"{attention},separate-columns,lower-block-matmul,lengths-as-inputs,constant-shapes",
        "cuda_native": "separate-columns,lower-block-matmul,constant-shapes",
    }
    half = _HALVES.get(precision, "to-float16" if kernels.startswith("cuda") else "")
    return (
        *parse_pipeline(operators[kernels]),
        *parse_pipeline(half),
        *parse_pipeline("remove-unused,name-sanity,attach-bodies,stamp-versions"),
    )


def default_pipeline(
    kernels: Kernels = "ort",
    precision: Precision = "fp32",
    *,
    max_positions: int = 8192,
    block_weights: Mapping[str, BlockWeights] | None = None,
    head_precision: str | None = None,
    exclude: Sequence[str] = (),
    block: int = NATIVE_BLOCK,
) -> tuple[GraphPass, ...]:
    """All passes for one set of kernels, as `shared_passes`, `layout_passes` and `kernel_passes` explain them."""
    shared = shared_passes(
        precision, block_weights=block_weights, head_precision=head_precision, exclude=exclude, block=block
    )
    return (*shared, *layout_passes([kernels], precision), *kernel_passes(kernels, precision, max_positions))


def why_not_native(model: ir.Model, precision: Precision) -> str:
    """Why the native kernels cannot run the graph that the shared and layout passes made; empty when they can."""
    pools = [value for value in model.graph.inputs if str(value.name).startswith(("k_pool.", "v_pool."))]
    if precision in _HALVES or any(pool.dtype not in (None, ir.DataType.FLOAT) for pool in pools):
        return "they compute in float32 only"
    by_rows = [node for node in model.graph if is_op(node, "BlockMatMul", DSPARK)]
    if others := sorted({attribute(node, "block", NATIVE_BLOCK) for node in by_rows} - {NATIVE_BLOCK}):
        return f"they take blocks of {NATIVE_BLOCK} weights only, got {others[0]}"
    names = [value.name for value in (input_at(node, 1) for node in by_rows) if value is not None]
    return f"they read interleaved matrices, and {names[0]} is read by something else as well" if names else ""


def why_not_cuda_native(model: ir.Model) -> str:
    """Why the bundle's compiled kernels cannot run the attention that the shared passes left; empty when they can."""
    nodes = [node for node in model.graph if is_op(node, "VerifyAttention", DSPARK)]
    if any(value is not None for node in nodes for value in node.inputs[_ROW_OFFSETS:]):
        return "inside a graph they take no packed rows"
    if len({attribute(node, "softcap", 0.0) > 0 for node in nodes}) > 1:
        return "the layers must all have a soft cap, or none"
    return ""


def carried_blocks(
    model: ir.Model,
    precision: Precision,
    block_weights: Mapping[str, BlockWeights],
    head_precision: str | None = None,
) -> dict[str, BlockWeights]:
    """The blocks of the checkpoint that stay as they are.

    ``keep`` takes them all. A width takes those that have it already: rounding rounded numbers to the same width
    again costs much accuracy (a 4-bit SmolLM2-135M agreed with itself on every second token only) for nothing.

    Args:
        model: the graph, for the matrix that makes the logits: it has a width of its own.
    """
    if precision == "keep":
        return dict(block_weights)
    if precision not in _WIDTHS:
        return {}
    head = head_weight(model.graph)
    wanted = _WIDTHS[precision]
    head_wanted = max(wanted, _WIDTHS.get(head_precision or "int8", 8))
    return {
        name: blocks
        for name, blocks in block_weights.items()
        if blocks.bits == (head_wanted if name == head else wanted)
    }


def _quantisation(
    precision: Precision,
    block_weights: Mapping[str, BlockWeights] | None,
    head_precision: str | None,
    exclude: Sequence[str],
    block: int,
) -> tuple[GraphPass, ...]:
    if block not in (32, 64, 128):
        raise RequestError("block_size", f"required 32, 64 or 128, got {block}")
    head = head_precision or "int8"
    if head not in ("int4", "int8", "fp32"):
        raise RequestError("head_precision", f"required int4, int8 or fp32, got {head!r}")
    quantize = QuantizeWeightsPass(
        bits=_WIDTHS[precision],
        block=block,  # type: ignore[arg-type]  # checked above
        head_bits=_WIDTHS.get(head, 8),
        exclude_head=head == "fp32",
        exclude=tuple(exclude),
        block_weights=block_weights or {},
    )
    return quantize, QuantizeEmbeddingPass()
