"""Experts: the function body, for every gating that the exporter recognises, against the reference."""

from __future__ import annotations

import pytest
from run_operator import run_operator

from dsc.kernels.contract import check_contract
from dsc.kernels.experts import ACTIVATIONS, EXPERTS, function_body, make_inputs, reference


def test_the_contract_holds():
    check_contract(EXPERTS)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["halves", "interleaved", "ungated", "transposed"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_body_and_reference_agree(activation, form, bias):
    if activation == "swiglu_limited" and form == "ungated":
        activation = "gelu"
    attributes = {
        "activation": activation,
        "gated": int(form != "ungated"),
        "interleaved": int(form == "interleaved"),
        "transposed": int(form == "transposed"),
        "alpha": 1.702,
        "limit": 1.5,
    }
    inputs = make_inputs(EXPERTS.example, seed=4)
    if form == "ungated":
        inputs["up"], inputs["up_bias"] = inputs["up"][:, :7].copy(), inputs["up_bias"][:, :7].copy()
    if form == "transposed":
        inputs["up"], inputs["down"] = inputs["up"].swapaxes(1, 2).copy(), inputs["down"].swapaxes(1, 2).copy()
    if not bias:
        del inputs["up_bias"], inputs["down_bias"]
    wanted = reference(inputs, attributes)
    names = [role.name for role in EXPERTS.inputs]
    found = run_operator("Experts", inputs, names, ["y"], attributes, function_body(attributes, bias))
    EXPERTS.assert_agrees("y", found["y"], wanted["y"])
