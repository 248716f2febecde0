"""Model-local function bodies, written in ONNX's own textual form."""

from __future__ import annotations

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
