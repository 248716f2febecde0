"""A forward graph in IEEE half precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from dsc.passes.base import GraphPass, PassResult
from dsc.passes.float_types import convert_floats


@dataclass(frozen=True)
class ToFloat16Pass(GraphPass):
    """Hold weights, KV pools and activations in float16.

    ::

        y = MatMul(RMSNormalization(x, g), W)
        ->
        y = MatMul(Cast(RMSNormalization(Cast(x, float32), g), float16), W16)

    float16 ends at 65504: the square of an activation of 300 is already outside, so a mean of squares taken in it
    is infinite and the normalised row zero.

    Rules:
        1. Products, embeddings and attention take and give float16; what only joins their results follows.
        2. Norms, reductions, softmax, powers and exponentials stay float32, casts around them; so do a square that is
           written as a product, and a product or quotient with what a reduction gave.
        3. Rotary angles, cosines and sines are computed in float32 from exact positions and rounded last.
        4. Graph inputs and KV pools become float16; `logits` and taps leave as float32.
        5. An explicit Cast keeps the type that it states; attention sinks of VerifyAttention stay float32.
    """

    name: ClassVar[str] = "to-float16"

    def call(self, model: ir.Model) -> PassResult:
        """Convert; `skipped` lists the nodes of rule 2."""
        return convert_floats(model, ir.DataType.FLOAT16)
