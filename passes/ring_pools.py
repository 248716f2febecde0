"""Say in the graph which KV pools may be rings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from dsc.passes.base import GraphPass, PassResult
from dsc.passes.graph_edit import DSPARK, attribute

RING_ROWS = "ring_rows"
_ATTENTION = ("QkvAttention", "VerifyAttention")
_POOLS_IN, _POOLS_OUT = slice(3, 5), slice(1, 3)


@dataclass(frozen=True)
class RingPoolsPass(GraphPass):
    """Give the rows of pools that only a sliding window looks at a name of their own.

    ::

        o, kp', vp' = VerifyAttention<window = 512>(q, k, v, kp[B, H, max_rows, D], ...)
        ->
        o, kp', vp' = VerifyAttention<window = 512>(q, k, v, kp[B, H, ring_rows_512, D], ...)

    These operators keep position p in row p mod rows, so such a pool needs rows for the window and a round only. The
    name tells the planner, and keeps onnxruntime from taking the pools of all layers for equally long.

    Rules:
        1. The node is the project's own attention and has a window.
        2. Its pools are inputs of the graph that nothing else reads.
    """

    name: ClassVar[str] = "ring-pools"

    def call(self, model: ir.Model) -> PassResult:
        """Name the rows of every such pool."""
        fired = 0
        for node in model.graph:
            if node.domain != DSPARK or node.op_type not in _ATTENTION or (window := attribute(node, "window", -1)) < 1:
                continue
            pools = [value for value in node.inputs[_POOLS_IN] if value is not None and _is_its_own(value)]
            if len(pools) == 2:
                renamed = [_name_rows(value, f"{RING_ROWS}_{window}") for value in (*pools, *node.outputs[_POOLS_OUT])]
                fired += any(renamed)
        return PassResult(fired)


def _is_its_own(value: ir.Value) -> bool:
    return value.is_graph_input() and len(value.uses()) == 1


def _name_rows(value: ir.Value, name: str) -> bool:
    """Give a pool's rows this name; whether they had another."""
    if value.shape is None or str(value.shape[2]) == name:
        return False
    value.shape = ir.Shape([*value.shape[:2], name, *value.shape[3:]])
    return True


def ring_layers(model: ir.Model) -> frozenset[int]:
    """The layers whose pools may be rings, by the names of their rows."""
    keys = (value for value in model.graph.inputs if str(value.name).startswith("k_pool."))
    return frozenset(
        int(str(value.name).removeprefix("k_pool."))
        for value in keys
        if value.shape is not None and str(value.shape[2]).startswith(RING_ROWS)
    )
