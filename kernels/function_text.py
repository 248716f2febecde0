"""Model-local function bodies, written in ONNX's own textual form."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

DOMAIN = "ai.dspark"
OPSET = 23


def parse_function(text: str, microsoft: bool = False) -> ir.Function:
    """A function of the `ai.dspark` domain from ``Name <attributes> (inputs) => (outputs) { body }``.

    Args:
        microsoft: the body uses onnxruntime's `com.microsoft` operators.
    """
    import onnx_ir as ir

    imports = f'"" : {OPSET}' + (', "com.microsoft" : 1' if microsoft else "")
    model = ir.from_onnx_text(
        f'<ir_version: 10, opset_import: ["" : {OPSET}, "{DOMAIN}" : 1]>\n'
        "unused (float x) => (float y) { y = Identity(x) }\n"
        f'<domain: "{DOMAIN}", opset_import: [{imports}]>\n{text}'
    )
    return next(iter(model.functions.values()))


def function_by_mins(node: ir.Node, body: Callable[[bool], ir.Function]) -> ir.Function:
    """`body` with or without minima, whichever a node's fourth input asks for; their overloads differ."""
    has_mins = len(node.inputs) > 3 and node.inputs[3] is not None
    function = body(has_mins)
    function.overload = "mins" if has_mins else "plain"
    return function


def function_by_type(node: ir.Node, body: Callable[[bool], ir.Function]) -> ir.Function:
    """`body` for a weight in bfloat16 or in float32, whichever a node's second input is; their overloads differ."""
    weight = node.inputs[1]
    halves = weight is not None and weight.dtype is not None and weight.dtype.name == "BFLOAT16"
    function = body(halves)
    function.overload = "bfloat16" if halves else ""
    return function
