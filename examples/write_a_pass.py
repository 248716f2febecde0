"""Write a graph pass of your own and run it on an exported model.

Usage: ``python examples/write_a_pass.py HF_DIRECTORY_OR_GGUF``.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import onnx_ir as ir

from dsc.compiler.sources import load_source
from dsc.passes.base import GraphPass, PassResult
from dsc.passes.pipeline import parse_pipeline, run_pipeline


@dataclass(frozen=True)
class RenameNodesPass(GraphPass):
    """Give every node a name that says what it is.

    ::

        node_17: MatMul  ->  matmul_17

    Rules:
        1. The name is the operator's, in small letters, and the node's number.
    """

    name: ClassVar[str] = "rename-nodes"

    separator: str = "_"

    def call(self, model: ir.Model) -> PassResult:
        """Rename every node of the main graph."""
        fired = 0
        for number, node in enumerate(model.graph):
            node.name = f"{node.op_type.lower()}{self.separator}{number}"
            fired += 1
        return PassResult(fired)


def main(path: str) -> None:
    model = load_source(Path(path)).export().model
    report = run_pipeline(model, [*parse_pipeline("fold-constants,eliminate-common-subexpressions"), RenameNodesPass()])
    for run in report.runs:
        print(f"{run.spec}: fired {run.fired} times in {run.seconds:.3f} s")
    print(dict(Counter(node.op_type for node in model.graph)))


if __name__ == "__main__":
    main(sys.argv[1])
