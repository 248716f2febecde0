"""A bundle's kernels in Triton's interpreter, in the place of a device: same choice of variants, same arguments.

Import only with TRITON_INTERPRET=1 set. Addresses are those of CPU tensors; the interpreter reads memory by address.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections import Counter
from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import torch
import triton.language as tl
from launch_records import record

from dsc.kernels.gpu_targets import architecture
from dsc.kernels.kernel_table import all_variants
from dsc.kernels.kernel_variant import KernelVariant
from dsc.kernels.launch_record import KernelArg
from dsc.runtime.device_kernels import DeviceKernels
from dsc.runtime.kernel_choice import CudaDevice

_TYPES = {"fp16": torch.float16, "fp32": torch.float32, "i8": torch.int8, "i32": torch.int32, "i64": torch.int64}


def pointer(address: int, kind: torch.dtype) -> torch.Tensor:
    """A tensor at an address; a null pointer is given a place that a kernel which does not use it may have.

    Its size says nothing, and is the same for every type, since two arguments may share an address.
    """
    if not address:
        return torch.zeros(1, dtype=kind)
    return torch.frombuffer((ctypes.c_char * 8).from_address(address), dtype=torch.uint8).view(kind)


def interpret(
    variant: KernelVariant,
    blocks: tuple[int, ...],
    values: Mapping[str, int | float],
    rows: torch.dtype = torch.float16,
) -> None:
    """Run a variant on addresses and numbers by argument name; `rows` is the type of its float16 pointers."""
    kinds = _TYPES | {"fp16": rows}
    given = {
        name: pointer(int(values[name]), kinds[kind[1:]]) if kind.startswith("*") else values[name]
        for name, kind in variant.signature
    }
    constants = {n: getattr(tl, v) if isinstance(v, str) else v for n, v in variant.constants.items()}
    function = getattr(importlib.import_module(f"dsc.kernels.{variant.module}"), variant.function)
    function[blocks](**given, **constants)


class InterpretedKernels(DeviceKernels):
    """Every declared variant of an architecture; `launched` counts the variants that ran."""

    def __init__(self, arch: str = "sm_90") -> None:
        device = CudaDevice("interpreter", architecture(arch).capability, 132, 232_448, 12_090)
        self.variants = {variant.name: variant for variant in all_variants(arch)}
        records = {}
        for variant in self.variants.values():
            args = tuple(KernelArg(name=name, type=kind) for name, kind in variant.signature)
            records[variant.name] = record(
                kernel=variant.kernel, variant=variant.name, arch=arch, entry=variant.function, args=args,
                grid=variant.grid, divisible_by_16=variant.divisible_by_16, equals=variant.equals,
                at_most=variant.at_most, num_warps=variant.num_warps,
            )  # fmt: skip
        super().__init__(SimpleNamespace(device=device), records, lambda member: member.encode())
        self.driver.prepare = lambda made, code: None
        self.launched: Counter[str] = Counter()

    def bind(self, kernel, axes, values):
        """As on a device; rows of float32, which no device kernel takes, run through the float16 variant."""
        rows = torch.float16
        if axes.get("dtype") == "float32":
            rows = torch.float32
            pool = axes["pool_dtype"] if axes.get("pool_dtype") != "float32" else "float16"
            axes = {**axes, "dtype": "float16", "pool_dtype": pool}
        made = self.choice.choose(kernel, axes, {name: v for name, v in values.items() if isinstance(v, int)})
        bound = super().bind(kernel, axes, values)
        variant = self.variants[made.variant]

        def run(stream: int = 0) -> None:
            self.launched[made.variant] += 1
            interpret(variant, bound.blocks, values, rows)

        return SimpleNamespace(run=run, blocks=bound.blocks, values=bound.values)


@contextlib.contextmanager
def counted_loads(tensor: torch.Tensor) -> Iterator[list[int]]:
    """A list that gets the number of elements of `tensor` that each load instruction reads."""
    from triton.runtime.interpreter import interpreter_builder

    first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    counts: list[int] = []
    original = interpreter_builder.create_masked_load

    def load(ptrs, mask, *rest):
        inside = (ptrs.data >= first) & (ptrs.data < end) & mask.data
        if inside.any():
            counts.append(int(inside.sum()))
        return original(ptrs, mask, *rest)

    interpreter_builder.create_masked_load = load
    try:
        yield counts
    finally:
        interpreter_builder.create_masked_load = original
