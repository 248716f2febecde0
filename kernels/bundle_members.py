"""Compiled kernels as members of a bundle, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import ValidationError

from dsc.bundle_schema.errors import BundleError
from dsc.bundle_schema.manifest import KernelEntry
from dsc.kernels.launch_record import LaunchRecord

if TYPE_CHECKING:
    from dsc.kernels.aot import CompiledKernel


def kernel_entry(kernel: CompiledKernel) -> KernelEntry:
    """The manifest entry of a compiled kernel; its code goes into the member that the entry names."""
    record = kernel.record
    return KernelEntry(
        name=record.variant,
        arch=record.arch,
        member=f"kernels/{record.arch}/{record.variant}.{record.image}",
        metadata=record.model_dump(mode="json"),
    )


def launch_records(entries: Iterable[KernelEntry]) -> dict[str, LaunchRecord]:
    """Member name -> launch record of every kernel in a manifest.

    Raises:
        BundleError: an entry's metadata is not a launch record, or contradicts the entry.
    """
    found = {}
    for entry in entries:
        try:
            record = LaunchRecord.model_validate(entry.metadata, strict=False)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise BundleError(f"manifest.json kernels {entry.name}", f"{field}: {first['msg']}") from error
        if (record.variant, record.arch) != (entry.name, entry.arch):
            raise BundleError(
                f"manifest.json kernels {entry.name}", f"its metadata is of {record.variant} for {record.arch}"
            )
        found[entry.member] = record
    return found
