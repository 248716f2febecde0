"""How a mixture-of-experts module combines its gate and up projections, found by trying it on random numbers.

`transformers` describes the layout of the weights by flags, but the gating itself is code. The few forms that
the `Experts` operator knows are compared with the module's own result; anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsc.bundle_schema.errors import ModelError

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


@dataclass(frozen=True)
class GateForm:
    """``hidden = act(gate) * up``, or ``act(up)`` when not `gated`.

    Attributes:
        activation: silu, gelu, gelu_tanh, relu, relu2 (squared), or swiglu_limited:
            ``min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (clip(up, -limit, limit) + 1)``.
        gated: whether there is a gate.
        interleaved: whether gate and up alternate along the axis rather than being its two halves.
        alpha, limit: of swiglu_limited.
    """

    activation: str
    gated: bool = True
    interleaved: bool = False
    alpha: float = 0.0
    limit: float = 0.0

    def attributes(self) -> dict[str, int | float | str]:
        """The attributes of an `Experts` node."""
        return {
            "activation": self.activation,
            "gated": int(self.gated),
            "interleaved": int(self.interleaved),
            "alpha": self.alpha,
            "limit": self.limit,
        }


def gate_form(module: Any) -> GateForm:
    """The form that reproduces `module`'s gating.

    Raises:
        ModelError: no known form does, or the module normalises each expert's output.
    """
    import torch

    name = type(module).__name__
    if module.has_post_expert_norm:
        raise ModelError(name, "experts must not be normalised one by one: the Experts operator has no such step")
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn((64, 32), generator=generator) * 6
    with torch.no_grad():
        expected = module._apply_gate(sample) if module.has_gate else module.act_fn(sample)
        for form in _forms(module):
            if torch.allclose(_evaluate(form, sample), expected, rtol=1e-5, atol=1e-6):
                return form
    raise ModelError(name, f"the experts' gating is none of {', '.join(_ACTIVATIONS)}, swiglu_limited")


def _forms(module: Any) -> Iterator[GateForm]:
    layouts = (False, True) if module.has_gate else (False,)
    for interleaved in layouts:
        for activation in _ACTIVATIONS:
            yield GateForm(activation, module.has_gate, interleaved)
        alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
        if module.has_gate and isinstance(alpha, float) and isinstance(limit, float):
            yield GateForm("swiglu_limited", True, interleaved, alpha, limit)


def _evaluate(form: GateForm, sample: Any) -> Any:
    import torch

    if not form.gated:
        return _activate(form.activation, sample)
    gate, up = (sample[..., ::2], sample[..., 1::2]) if form.interleaved else sample.chunk(2, dim=-1)
    if form.activation == "swiglu_limited":
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
        return gate * torch.sigmoid(form.alpha * gate) * (up + 1)
    return _activate(form.activation, gate) * up


def _activate(name: str, x: Any) -> Any:
    from torch.nn import functional

    if name == "relu2":
        return functional.relu(x) ** 2
    if name == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    return getattr(functional, name)(x)
