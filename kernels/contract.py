"""What an operator is: axes, tensors, a NumPy reference and everything needed to judge an implementation by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dsc.bundle_schema.errors import KernelError

Array = NDArray[Any]
Axes = Mapping[str, int]
Role = Literal["float", "pool", "int32", "int64", "int16", "uint8", "bool", "float32"]

NEUTRAL_FILTERS: dict[str, tuple[int, type]] = {
    "top_k": (0, np.int32),
    "top_p": (1, np.float32),
    "min_p": (0, np.float32),
}
"""Sampling filters that leave every token: value and type by input name."""
# Relative to the largest absolute value of the reference's output.
TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class TensorRole:
    """One input or output of an operator.

    Attributes:
        axes: names of the operator's axes, or fixed sizes.
        kind: ``float`` is the type under test, anything else is that type always.
        optional: the operator also works without it.
    """

    name: str
    axes: tuple[str | int, ...]
    kind: Role = "float"
    optional: bool = False

    def shape(self, axes: Axes) -> tuple[int, ...]:
        """The concrete shape."""
        return tuple(axes[axis] if isinstance(axis, str) else axis for axis in self.axes)


@dataclass(frozen=True)
class KernelContract:
    """One operator of the `ai.dspark` domain.

    Attributes:
        axes: name -> meaning.
        attributes: name -> meaning.
        reference: ``reference(inputs, attributes) -> outputs``, all by name; plain NumPy, the definition.
        make_inputs: ``make_inputs(axes, seed) -> inputs`` in float32; seeded, valid, with nothing neutral in it.
        nbytes: bytes that an ideal implementation moves.
        flops: floating point operations that it does.
        example: axes of a small odd-shaped case that every implementation must get right.
    """

    name: str
    axes: Mapping[str, str]
    inputs: tuple[TensorRole, ...]
    outputs: tuple[TensorRole, ...]
    reference: Callable[[Mapping[str, Array], Mapping[str, Any]], dict[str, Array]]
    make_inputs: Callable[[Axes, int], dict[str, Array]]
    nbytes: Callable[[Axes], int]
    flops: Callable[[Axes], int]
    example: Mapping[str, int]
    attributes: Mapping[str, str] = field(default_factory=dict)
    tolerances: Mapping[str, float] = field(default_factory=lambda: dict(TOLERANCES))
    version: int = 1

    def results(self, inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
        """The reference's outputs; sampling filters that are not given are neutral."""
        if "temperature" in inputs:
            n = len(inputs["temperature"])
            inputs = {name: np.full(n, value, kind) for name, (value, kind) in NEUTRAL_FILTERS.items()} | dict(inputs)
        return self.reference(inputs, attributes)

    def assert_agrees(self, name: str, found: Array, wanted: Array, dtype: str = "float32") -> None:
        """Compare one output with the reference's: integers exactly, floats within the tolerance of `dtype`.

        Raises:
            KernelError: says by how much they differ, and where.
        """
        if found.shape != wanted.shape:
            raise KernelError(f"{self.name} {name}", f"shape {wanted.shape} is required, got {found.shape}")
        if wanted.dtype.kind in "iub":
            if not np.array_equal(found, wanted):
                at = tuple(int(i) for i in np.argwhere(found != wanted)[0])
                raise KernelError(f"{self.name} {name}{list(at)}", f"{wanted[at]} is required, got {found[at]}")
            return
        scale = float(np.abs(wanted).max()) or 1.0
        error = float(np.abs(found.astype(np.float64) - wanted).max()) / scale if wanted.size else 0.0
        if not error <= self.tolerances[dtype]:
            raise KernelError(
                f"{self.name} {name}", f"a relative error of {self.tolerances[dtype]} is allowed, got {error:.3g}"
            )


def check_contract(contract: KernelContract) -> None:
    """Check a contract against itself: names exist, inputs have the declared shapes, outputs too.

    Raises:
        KernelError: names what contradicts what.
    """
    where = contract.name
    for role in (*contract.inputs, *contract.outputs):
        unknown = [axis for axis in role.axes if isinstance(axis, str) and axis not in contract.axes]
        if unknown:
            raise KernelError(where, f"{role.name} has the axis {unknown[0]!r}, which is not declared")
    if missing := set(contract.axes) - set(contract.example):
        raise KernelError(where, f"the example has no size for {sorted(missing)[0]!r}")
    inputs = contract.make_inputs(contract.example, 0)
    outputs = contract.reference(inputs, {})
    for roles, found in ((contract.inputs, inputs), (contract.outputs, outputs)):
        for role in roles:
            if role.name not in found:
                if role.optional:
                    continue
                raise KernelError(where, f"{role.name} is required and was not made")
            if found[role.name].shape != role.shape(contract.example):
                wanted = role.shape(contract.example)
                raise KernelError(where, f"{role.name} must have shape {wanted}, got {found[role.name].shape}")
