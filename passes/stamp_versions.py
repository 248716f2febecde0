"""IR and opset versions that the oldest supported onnxruntime reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from dsc.bundle_schema.errors import PassError
from dsc.passes.base import GraphPass, PassResult

MAX_IR_VERSION = 13
MAX_OPSET = 26
_IR_VERSION_OF_OPSET = {24: 12, 25: 13, 26: 13}
_LOWEST_IR_VERSION = 10


@dataclass(frozen=True)
class StampVersionsPass(GraphPass):
    """Declare the lowest versions that describe the graph.

    ::

        ir_version 14, opset 23  ->  ir_version 10, opset 23

    onnx writes its newest IR version by default, which an onnxruntime of the same week refuses. onnxruntime 1.31, the
    oldest supported one, reads IR versions up to 13 and opsets up to 26.

    Rules:
        1. The IR version becomes 10, or what the opset came with when that is later.
        2. A newer opset than 26 is refused: lowering a version number would change what operators mean.
    """

    name: ClassVar[str] = "stamp-versions"

    def requires(self, model: ir.Model) -> None:
        """The opset is one that onnxruntime 1.31 reads (rule 2)."""
        opset = model.opset_imports.get("", 0)
        if opset > MAX_OPSET:
            raise PassError(
                "opset", f"required at most {MAX_OPSET} for onnxruntime 1.31, got {opset}", "export with opset 23 or 24"
            )

    def call(self, model: ir.Model) -> PassResult:
        """Set the IR version (rule 1)."""
        wanted = _IR_VERSION_OF_OPSET.get(model.opset_imports.get("", 0), _LOWEST_IR_VERSION)
        changed = model.ir_version != wanted
        model.ir_version = wanted
        return PassResult(int(changed))
