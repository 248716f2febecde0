"""Which of a bundle's compiled kernels serves a launch on a device, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsc.bundle_schema.errors import KernelError
from dsc.kernels.gpu_targets import ARCHITECTURES
from dsc.kernels.launch_record import LaunchRecord

_MAX_GRID_YZ = 65535


@dataclass(frozen=True)
class CudaDevice:
    """What selection needs to know of a device; `driver` is 1000 * major + 10 * minor of its CUDA version."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_per_block: int
    driver: int


def device_refusal(record: LaunchRecord, device: CudaDevice) -> str:
    """Why an image does not run on a device, or an empty string."""
    target = ARCHITECTURES.get(record.arch)
    if target is None or target.capability is None:
        return f"{record.arch} is not a CUDA architecture known to this version"
    have = f"{device.capability[0]}.{device.capability[1]}"
    if record.image != "ptx":
        same = device.capability == target.capability
        later = device.capability[0] == target.capability[0] and device.capability[1] > target.capability[1]
        if not (same or (later and not target.exact)):
            return f"built for {record.arch}, the device has compute capability {have}"
    elif device.capability < target.capability:
        return f"its PTX needs compute capability 8.0, the device has {have}"
    if device.driver < record.minimum_driver:
        return f"needs a CUDA {_version(record.minimum_driver)} driver, this one is {_version(device.driver)}"
    if record.shared > device.shared_per_block:
        return f"needs {record.shared} bytes of shared memory, a block of the device has {device.shared_per_block}"
    return _launch_refusal(record)


def _launch_refusal(record: LaunchRecord) -> str:
    """Why the plain launch call cannot start an image: it needs attributes or scratch memory."""
    if record.num_ctas > 1 or record.cooperative or record.programmatic_launch:
        return "needs clusters, a cooperative or a programmatic launch"
    if record.global_scratch_size or record.profile_scratch_size:
        return "needs scratch memory"
    return ""


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def preference(record: LaunchRecord, device: CudaDevice) -> tuple[int, int]:
    """Sort key: images of the device's own architecture first, then of an older minor, then PTX."""
    if record.image == "ptx":
        return 2, 0
    capability = ARCHITECTURES[record.arch].capability or (0, 0)
    return int(capability != device.capability), -capability[1]


class KernelChoice:
    """The kernels of a bundle that run on one device, in the order in which they are tried.

    Args:
        records: launch records of every kernel in the bundle.
        device: the device at hand.

    Attributes:
        refused: variant and architecture -> why it does not run here.
    """

    def __init__(self, records: tuple[LaunchRecord, ...], device: CudaDevice) -> None:
        reasons = [(record, device_refusal(record, device)) for record in records]
        self.refused = {f"{record.variant} ({record.arch})": why for record, why in reasons if why}
        usable = [record for record, why in reasons if not why]
        self._usable = sorted(usable, key=lambda record: preference(record, device))

    def choose(
        self, kernel: str, axes: Mapping[str, int | str], pointers: Mapping[str, int] | None = None
    ) -> LaunchRecord:
        """The first variant that serves these shapes, types and pointer alignments.

        Args:
            kernel: e.g. ``dspark_verify_head_tiled``.
            axes: sizes and types of the launch.
            pointers: argument -> address, where the caller knows it already.

        Raises:
            KernelError: none does; the message holds every variant's reason.
        """
        mine = [record for record in self._usable if record.kernel == kernel]
        reasons = []
        for record in mine:
            why = record.refusal(dict(axes)) or _shape_refusal(record, axes) or unaligned(record, pointers or {})
            if not why:
                return record
            reasons.append(f"{record.variant}: {why}")
        known = [f"{name}: {why}" for name, why in self.refused.items()]
        raise KernelError(kernel, "no variant serves this launch", "; ".join(reasons or known) or "not in the bundle")


def _shape_refusal(record: LaunchRecord, axes: Mapping[str, int | str]) -> str:
    sizes = {axis: size for axis, size in axes.items() if isinstance(size, int)}
    _, y, z = record.blocks(sizes)
    return f"the grid {y} x {z} exceeds {_MAX_GRID_YZ} in y or z" if max(y, z) > _MAX_GRID_YZ else ""


def unaligned(record: LaunchRecord, pointers: Mapping[str, int]) -> str:
    """Which address breaks the variant's promise of 16-byte alignment, or an empty string."""
    for name in record.divisible_by_16:
        if pointers.get(name, 0) % 16:
            return f"{name} is not a multiple of 16"
    return ""
