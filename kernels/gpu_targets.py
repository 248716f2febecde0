"""The GPU architectures that kernels are built for, and what one multiprocessor of each can hold.

The figures are the vendors' published limits. `reference` names the card whose bandwidth and rate the
roofline time of `dsc kernels show` is computed for; it is a declaration, not a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsc.bundle_schema.errors import KernelError


@dataclass(frozen=True)
class ReferenceCard:
    """A card of an architecture: `bandwidth` in bytes/s, `tensor_rate` in dense 16-bit FLOP/s."""

    name: str
    multiprocessors: int
    bandwidth: float
    tensor_rate: float


@dataclass(frozen=True)
class Architecture:
    """One build target.

    `capability` is the CUDA compute capability (None for AMD). `exact` says that its images run on this
    capability only; otherwise they run on every later minor of the same major. `tensor_opcodes` are the
    opcode prefixes that prove that matrix units are used. Memory sizes are bytes.
    """

    name: str
    backend: str
    image: str
    capability: tuple[int, int] | None
    warp_size: int
    shared_per_block: int
    shared_per_multiprocessor: int
    registers_per_multiprocessor: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    exact: bool
    tensor_opcodes: tuple[str, ...]
    reference: ReferenceCard

    @property
    def triton_arch(self) -> int | str:
        """The architecture as Triton's `GPUTarget` takes it."""
        if self.capability is None:
            return self.name
        return self.capability[0] * 10 + self.capability[1]


_KIB = 1024
_A100 = ReferenceCard("A100 SXM 80 GB", 108, 2.039e12, 312e12)


def _cuda(
    name: str,
    shared_kib: tuple[int, int],
    threads: int,
    blocks: int,
    tensor_opcodes: tuple[str, ...],
    card: ReferenceCard,
) -> Architecture:
    """A CUDA target; `shared_kib` is (per block, per multiprocessor)."""
    number = int(name.split("_")[1])
    return Architecture(
        name=name,
        backend="cuda",
        image="ptx" if name.startswith("compute_") else "cubin",
        capability=divmod(number, 10),
        warp_size=32,
        shared_per_block=shared_kib[0] * _KIB,
        shared_per_multiprocessor=shared_kib[1] * _KIB,
        registers_per_multiprocessor=65536,
        threads_per_multiprocessor=threads,
        blocks_per_multiprocessor=blocks,
        exact=number >= 90,
        tensor_opcodes=tensor_opcodes,
        reference=card,
    )


def _hip(name: str, shared_kib: int, card: ReferenceCard) -> Architecture:
    """An AMD CDNA target: 64-wide waves, 8 waves on each of 4 units, 512 vector registers a lane."""
    return Architecture(
        name=name,
        backend="hip",
        image="hsaco",
        capability=None,
        warp_size=64,
        shared_per_block=shared_kib * _KIB,
        shared_per_multiprocessor=shared_kib * _KIB,
        registers_per_multiprocessor=4 * 512 * 64,
        threads_per_multiprocessor=2048,
        blocks_per_multiprocessor=32,
        exact=True,
        tensor_opcodes=("v_mfma",),
        reference=card,
    )


_MMA, _WGMMA, _TCGEN = ("HMMA",), ("HMMA", "HGMMA"), ("HMMA", "UTCHMMA")
ARCHITECTURES: dict[str, Architecture] = {
    target.name: target
    for target in (
        _cuda("sm_80", (163, 164), 2048, 32, _MMA, _A100),
        _cuda("sm_86", (99, 100), 1536, 16, _MMA, ReferenceCard("A10", 72, 0.6e12, 125e12)),
        _cuda("sm_89", (99, 100), 1536, 24, _MMA, ReferenceCard("L40S", 142, 0.864e12, 362e12)),
        _cuda("sm_90", (227, 228), 2048, 32, _WGMMA, ReferenceCard("H100 SXM", 132, 3.35e12, 989e12)),
        _cuda("sm_100", (227, 228), 2048, 32, _TCGEN, ReferenceCard("B200", 148, 8.0e12, 2250e12)),
        _cuda("sm_120", (99, 100), 1536, 24, _MMA, ReferenceCard("RTX 5090", 170, 1.792e12, 209e12)),
        # PTX that any driver compiles for the device at hand: the fall-back of devices without an own image.
        # Built for the smallest shared memory of all, so that it fits wherever it lands.
        _cuda("compute_80", (99, 100), 1536, 16, ("mma.sync",), _A100),
        _hip("gfx942", 64, ReferenceCard("MI300X", 304, 5.3e12, 1307e12)),
        _hip("gfx950", 160, ReferenceCard("MI355X", 256, 8.0e12, 2500e12)),
    )
}
DEFAULT_ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "compute_80")


def architecture(name: str) -> Architecture:
    """The build target called `name`.

    Raises:
        KernelError: no such target; the message lists the known ones.
    """
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise KernelError("--arch", f"{name!r} is not a known GPU architecture", f"known: {known}")
    return ARCHITECTURES[name]


def architectures(names: str | tuple[str, ...]) -> tuple[Architecture, ...]:
    """Every target of a comma-separated list or tuple, in the given order and without repeats.

    Raises:
        KernelError: one of them is unknown, or the list is empty.
    """
    listed = [part.strip() for part in names.split(",")] if isinstance(names, str) else list(names)
    wanted = tuple(architecture(name) for name in dict.fromkeys(part for part in listed if part))
    if not wanted:
        raise KernelError("--arch", "the list of architectures is empty", f"known: {', '.join(ARCHITECTURES)}")
    return wanted
