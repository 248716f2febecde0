"""A Triton kernel with everything that compiling it without a device requires."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsc.kernels.launch_record import GridFactor


@dataclass(frozen=True)
class KernelVariant:
    """One declared configuration of one kernel.

    Attributes:
        kernel: the public name of the kernel, e.g. ``dspark_verify_head_tiled``.
        name: unique name of the variant; the name of its members in a bundle.
        module: the module of ``dsc.kernels`` that holds the Triton function (loaded by name).
        function: the Triton function.
        signature: (argument, Triton type) of every run-time argument, in order.
        constants: compile-time constants by argument name.
        divisible_by_16: arguments whose address or value is promised to be a multiple of 16.
        grid: three dimensions, each a product of ceil(axis / per).
        equals: axis or type -> the only value served.
        at_most: axis -> the largest size served.
        max_registers: registers a thread may use; None leaves the trade against occupancy to the assembler.
        uses_tensor_cores: whether the code must contain matrix instructions.
    """

    kernel: str
    name: str
    module: str
    function: str
    signature: tuple[tuple[str, str], ...]
    constants: dict[str, int | float | bool | str]
    divisible_by_16: tuple[str, ...]
    grid: tuple[tuple[GridFactor, ...], tuple[GridFactor, ...], tuple[GridFactor, ...]]
    equals: dict[str, int | str] = field(default_factory=dict)
    at_most: dict[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None
    uses_tensor_cores: bool = False
