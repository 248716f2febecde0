"""The table of contracts: each one agrees with itself and has a body to go with it."""

from __future__ import annotations

from importlib import import_module

import pytest

from dsc.bundle_schema.errors import KernelError
from dsc.kernels.contract import check_contract
from dsc.kernels.table import CONTRACTS, load_contract
from dsc.passes.attach_bodies import BODIES


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_a_contract_agrees_with_itself_and_has_its_operators_name(name):
    contract = load_contract(name)
    assert contract.name == name
    check_contract(contract)
    assert contract.nbytes(contract.example) > 0
    assert contract.flops(contract.example) >= 0


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_seeded_inputs_are_the_same_twice_and_differ_between_seeds(name):
    contract = load_contract(name)
    first, again, other = (contract.make_inputs(contract.example, seed) for seed in (1, 1, 2))
    assert all((first[key] == again[key]).all() for key in first)
    assert any((first[key] != other[key]).any() for key in first)


@pytest.mark.parametrize("name", sorted(BODIES))
def test_what_has_a_body_has_a_contract(name):
    assert name in CONTRACTS
    assert callable(import_module(BODIES[name]).function_for)


def test_an_unknown_operator_is_refused_with_the_known_ones():
    with pytest.raises(KernelError, match=r"Attention3000.*") as caught:
        load_contract("Attention3000")
    for name in CONTRACTS:
        assert name in str(caught.value)
