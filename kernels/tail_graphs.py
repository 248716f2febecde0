"""The tail graphs of a bundle: one `SpeculativeVerify` node with its body, cut off from the forward graph.

A tail takes the forward graph's logits where they are, so a provider that keeps them on a device never sends them to
the host. Sequences, drafts and vocabulary are symbolic: one tail serves every window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsc.bundle_schema.errors import KernelError
from dsc.kernels.function_text import DOMAIN, OPSET
from dsc.kernels.speculative_verify import MODES, SPECULATIVE_VERIFY, function_for, input_names

if TYPE_CHECKING:
    import onnx_ir as ir

    from dsc.kernels.contract import TensorRole

_IR_VERSION = 10
_DIMS = {"B": "batch", "K": "drafts", "R": "rows", "V": "vocab", "W": "proposed", "H": "history"}


def greedy_tail(penalties: bool = False) -> ir.Model:
    """logits float32 [batch, rows, vocab], draft_ids, draft_lengths -> n_accepted, next_token, cause; no softmax."""
    return _tail("greedy", sparse=False, penalties=penalties)


def sampled_tail(mode: str, sparse: bool = False, penalties: bool = False) -> ir.Model:
    """The tail of a sampled mode: the greedy inputs, then uniforms, filters and, but for ``deterministic``, q.

    Args:
        mode: ``deterministic``, ``rejection`` or ``block``.
        sparse: q is given on its support `q_ids` only.
        penalties: last come history, prompt_lengths and penalties; where all penalties are neutral (1, 0, 0), nothing
            is computed of them.

    Raises:
        KernelError: `mode` is not a sampled mode, or a point mass is to be sparse.
    """
    sampled = MODES[1:]
    if mode not in sampled:
        raise KernelError("sampled tail", f"one of the modes {', '.join(sampled)} is required, got {mode!r}")
    if sparse and mode == "deterministic":
        raise KernelError("sampled tail", "mode deterministic has no q that could be sparse")
    return _tail(mode, sparse, penalties)


def _tail(mode: str, sparse: bool, penalties: bool) -> ir.Model:
    import onnx_ir as ir

    names = input_names(mode, sparse, penalties)
    inputs = {role.name: _value(role, sparse) for role in SPECULATIVE_VERIFY.inputs if role.name in names}
    last = max(index for index, role in enumerate(SPECULATIVE_VERIFY.inputs) if role.name in names)
    given = [inputs.get(role.name) for role in SPECULATIVE_VERIFY.inputs[: last + 1]]
    outputs = [_value(role, sparse) for role in SPECULATIVE_VERIFY.outputs]
    node = ir.node("SpeculativeVerify", given, attributes={"mode": mode}, domain=DOMAIN, outputs=outputs, name="verify")
    body = function_for(node)
    node.overload = body.overload
    graph = ir.Graph(
        list(inputs.values()), outputs, nodes=[node], name=f"verify_{mode}", opset_imports={"": OPSET, DOMAIN: 1}
    )
    return ir.Model(graph, ir_version=_IR_VERSION, producer_name="dsc", functions=[body])


def _value(role: TensorRole, sparse: bool) -> ir.Value:
    import onnx_ir as ir

    kinds = {"float32": ir.DataType.FLOAT, "int32": ir.DataType.INT32, "int64": ir.DataType.INT64}
    names = _DIMS if sparse else {**_DIMS, "W": "vocab"}
    dims = [names[axis] if isinstance(axis, str) else axis for axis in role.axes]
    return ir.Value(name=role.name, type=ir.TensorType(kinds[role.kind]), shape=ir.Shape(dims))
