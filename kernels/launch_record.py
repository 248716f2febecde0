"""What a program must know to launch a compiled kernel without the compiler that made it.

Triton's launch convention, as read from the binaries: the parameters are all arguments that are not
compile-time constants, in order, and then always two 64-bit pointers, global scratch and profile scratch. A
block has `warp_size * num_warps` threads in x. Dynamic shared memory above 48 KiB must be asked for first.
"""

from __future__ import annotations

from math import ceil, prod

from dsc.bundle_schema.errors import KernelError
from dsc.bundle_schema.tensors import StrictModel


class KernelArg(StrictModel):
    """A run-time argument: its name and Triton type (``*fp16``, ``i32``, ``fp32``, ...)."""

    name: str
    type: str

    @property
    def is_pointer(self) -> bool:
        """Whether the argument is a device address."""
        return self.type.startswith("*")


class GridFactor(StrictModel):
    """One factor of a grid dimension: ceil(axis / per)."""

    axis: str
    per: int = 1


class Resources(StrictModel):
    """Registers a thread; bytes of stack and local memory a thread and of shared memory a block."""

    registers: int
    stack: int
    shared: int
    local: int


class LaunchRecord(StrictModel):
    """Everything about one compiled variant except its code.

    `equals` and `at_most` are the launch shapes and types that the variant serves; `divisible_by_16` names
    the arguments whose address or value the compiler took to be a multiple of 16. `minimum_driver` is the
    least CUDA version (1000 * major + 10 * minor) that can load the image, `ptx_version` that of the PTX it
    was made from.
    """

    kernel: str
    variant: str
    arch: str
    image: str
    entry: str
    args: tuple[KernelArg, ...]
    constants: dict[str, int | float | bool | str]
    divisible_by_16: tuple[str, ...]
    grid: tuple[tuple[GridFactor, ...], ...]
    equals: dict[str, int | str]
    at_most: dict[str, int]
    num_warps: int
    num_ctas: int
    num_stages: int
    warp_size: int
    shared: int
    tmem_size: int
    global_scratch_size: int
    global_scratch_align: int
    profile_scratch_size: int
    profile_scratch_align: int
    cooperative: bool
    programmatic_launch: bool
    resources: Resources | None
    opcodes: dict[str, int]
    sha256: str
    triton_version: str
    assembler_version: str
    ptx_version: str
    minimum_driver: int
    line_info: bool
    fp_fusion: bool

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return self.num_warps * self.warp_size

    def blocks(self, axes: dict[str, int]) -> tuple[int, int, int]:
        """The grid for the given axis sizes.

        Raises:
            KernelError: an axis of the grid has no size.
        """
        try:
            x, y, z = (prod(ceil(axes[f.axis] / f.per) for f in dimension) for dimension in self.grid)
        except KeyError as missing:
            raise KernelError(self.variant, f"the launch needs the size of axis {missing}") from missing
        return x * self.num_ctas, y, z

    def refusal(self, axes: dict[str, int | str]) -> str:
        """Why the variant does not serve a launch of these shapes and types, or an empty string."""
        for axis, wanted in self.equals.items():
            if axes.get(axis) != wanted:
                return f"{axis} is {axes.get(axis)}, the variant serves {wanted}"
        for axis, limit in self.at_most.items():
            size = axes.get(axis)
            if not isinstance(size, int) or size > limit:
                return f"{axis} is {size}, the variant serves at most {limit}"
        return ""
