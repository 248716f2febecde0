"""The default order of the passes: what a precision asks for, then what a kernel set asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from dsc.passes.base import GraphPass
from dsc.passes.block_quantisation import BlockWeights
from dsc.passes.pipeline import parse_pipeline
from dsc.passes.quantize_weights import QuantizeWeightsPass

_CLEAN = "fold-constants,eliminate-common-subexpressions,remove-unused"
_BITS: dict[str, Literal[4, 8]] = {"int4": 4, "int8": 8}


def shared_pipeline(
    precision: str,
    block: int = 32,
    head_precision: str | None = None,
    exclude: tuple[str, ...] = (),
    block_weights: Mapping[str, BlockWeights] | None = None,
) -> tuple[GraphPass, ...]:
    """Passes that all kernel sets share.

    Args:
        precision: fp32, fp16, int8, int4, or keep: the blocks in `block_weights` and int8 for other matrices.
        head_precision: int4 or int8, of the matrix that makes the logits; int8 when None.
        exclude: patterns of matrices that keep their floats.
    """
    if precision == "fp32":
        return parse_pipeline(_CLEAN)
    if precision == "fp16":
        return parse_pipeline(f"{_CLEAN},to-float16")
    quantize = QuantizeWeightsPass(
        bits=_BITS.get(precision, 8),
        block=block,  # type: ignore[arg-type]  # the request allows 32, 64 and 128
        head_bits=_BITS[head_precision or "int8"],
        exclude=exclude,
        block_weights=block_weights or {},
    )
    return (*parse_pipeline(_CLEAN), quantize, *parse_pipeline("quantize-embedding"))


def backend_pipeline(backend: Literal["cpu"], native: bool) -> tuple[GraphPass, ...]:
    """Passes for one kernel set.

    Args:
        native: keep `ai.dspark` operators for the native library; otherwise lower them to onnxruntime's own.
    """
    lower = "" if native else "lower-attention{fold_rotary=true},lower-block-matmul,"
    return parse_pipeline(f"fuse-skip-norm,{lower}attach-bodies,remove-unused,name-sanity,stamp-versions")
