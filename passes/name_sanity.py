"""Names that depend on the graph alone, and nothing in it that tells of the machine that made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass

from dsc.passes.base import GraphPass, PassResult
from dsc.passes.graph_edit import producer


@dataclass(frozen=True)
class NameSanityPass(GraphPass):
    """Name nodes and inner values by their place, and clear what exporters write beside the graph.

    ::

        val_2392 = Cos[node_Cos_7](mul_25) # file "/home/me/model.py", line 3  ->  cos_0 = Cos[cos_0](mul_0)

    Exporters number values in the order they happen to make them and keep stack traces with local paths, which
    would make two compilations of one model different files.

    Rules:
        1. Graph inputs, outputs and initializers keep their names: they are the interface and the checkpoint's.
        2. Other values and all nodes are named ``<operator>_<n>``, counted by operator in graph order.
        3. Metadata and documentation strings of the graph, its nodes and values are cleared.
    """

    name: ClassVar[str] = "name-sanity"

    def call(self, model: ir.Model) -> PassResult:
        """Clear, then name."""
        fired = int(ClearMetadataAndDocStringPass()(model).modified)
        graph = model.graph
        kept = {str(v.name) for v in [*graph.inputs, *graph.initializers.values(), *graph.outputs]}
        counts: dict[str, int] = {}
        new_names: list[tuple[ir.Value, str]] = []
        for node in graph:
            name = _next_name(node.op_type.lower(), counts, kept)
            fired += node.name != name
            node.name = name
            inner = [out for out in node.outputs if out.name and not out.is_graph_output()]
            suffixes = [""] if len(node.outputs) == 1 else [f"_{out.index()}" for out in inner]
            new_names += [(out, f"{name}{suffix}") for out, suffix in zip(inner, suffixes, strict=False)]
        for value, _ in new_names:
            value.name = None  # a new name may be the old one of another value
        for value, name in new_names:
            value.name = name
        return PassResult(fired)

    def ensures(self, model: ir.Model) -> None:
        """No value that is used went without a name."""
        unnamed = [node for node in model.graph for value in node.inputs if value is not None and not value.name]
        if unnamed:
            raise RuntimeError(f"unnamed input of {unnamed[0].name}, made by {producer(unnamed[0].inputs[0])}")


def _next_name(operator: str, counts: dict[str, int], kept: set[str]) -> str:
    while True:
        number = counts.get(operator, 0)
        counts[operator] = number + 1
        name = f"{operator}_{number}"
        if name not in kept and not any(f"{name}_{index}" in kept for index in range(4)):
            return name
