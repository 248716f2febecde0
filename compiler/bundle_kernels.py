"""The GPU kernels that lie in a bundle: what each costs, whether it is whole, and which one a device would use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dsc.bundle_schema.container import OpenBundle, open_bundle
from dsc.bundle_schema.dflash_config import DFLASH_CONFIG_NAME, parse_config
from dsc.bundle_schema.errors import BundleError, KernelError, RequestError
from dsc.bundle_schema.manifest import Manifest
from dsc.compiler.console import format_nbytes, parse_number
from dsc.kernels.bundle_members import launch_records
from dsc.kernels.gpu_targets import ARCHITECTURES
from dsc.kernels.launch_record import LaunchRecord
from dsc.runtime.cuda_driver import CudaDriver
from dsc.runtime.kernel_choice import CudaDevice, KernelChoice

_NEWEST_DRIVER = 99_990
_DEVICES = tuple(name for name, arch in ARCHITECTURES.items() if arch.image == "cubin")


def kernel_rows(path: Path) -> list[dict[str, Any]]:
    """One row a kernel of the bundle: what it is, what it takes of a multiprocessor, what it needs.

    Raises:
        BundleError: the bundle cannot be read, or a kernel's metadata is no launch record.
    """
    with open_bundle(path) as bundle:
        records = launch_records(bundle.manifest.kernels)
        return [
            {
                "variant": record.variant,
                "arch": record.arch,
                "bytes": bundle.member(member).nbytes,
                "registers": record.resources.registers if record.resources else None,
                "shared": record.shared,
                "local": record.resources.local if record.resources else None,
                "matrix instructions": _counts(record.opcodes),
                "least driver": _version(record.minimum_driver),
            }
            for member, record in records.items()
        ]


def kernels_section(manifest: Manifest) -> dict[str, Any]:
    """What `dsc inspect` says of the kernels: for each architecture how many, how large, the least driver."""
    nbytes = {member.name: member.nbytes for member in manifest.members}
    by_arch: dict[str, list[tuple[str, LaunchRecord]]] = {}
    for member, record in launch_records(manifest.kernels).items():
        by_arch.setdefault(record.arch, []).append((member, record))
    section = {
        arch: f"{len(items)} kernels, {format_nbytes(sum(nbytes[member] for member, _ in items))}"
        f"{_needs(record for _, record in items)}"
        for arch, items in by_arch.items()
    }
    left_out = {f"no {kernels}": why for kernels, why in manifest.kernels_left_out.items()}
    return {**section, **left_out} or {"GPU kernels": "none in this bundle"}


def check_kernels(bundle: OpenBundle) -> str:
    """Compare every kernel's record with its code and its architecture; returns what was found.

    Raises:
        BundleError: a record is malformed, describes other code, or names an unknown architecture.
    """
    records = launch_records(bundle.manifest.kernels)
    for member, record in records.items():
        where, arch = f"manifest.json kernels {member}", ARCHITECTURES.get(record.arch)
        if arch is None:
            known = ", ".join(ARCHITECTURES)
            raise BundleError(where, f"the architecture {record.arch} is not known", f"known: {known}")
        if record.image != arch.image:
            raise BundleError(where, f"{record.arch} takes a {arch.image}, the record describes a {record.image}")
        if record.sha256 != bundle.member(member).sha256:
            raise BundleError(where, "its record describes other code", "compile or download the bundle again")
    archs = ", ".join(dict.fromkeys(record.arch for record in records.values()))
    return f"{len(records)} kernels for {archs}" if records else "none"


def device_report(path: Path, device: str, driver: str | None) -> dict[str, Any]:
    """What would run on a device: for every kind of launch the variant that serves it, or why none does.

    Args:
        device: ``none``, an architecture such as ``sm_90``, or the number of a CUDA device of this machine.
        driver: CUDA version of the driver of a device that is only named, ``12.4``; the newest when None.

    Raises:
        RequestError: `device` or `driver` is none of these.
        HostError: there is no such CUDA device here.
    """
    with open_bundle(path) as bundle:
        manifest, config = bundle.manifest, parse_config(bundle.read(DFLASH_CONFIG_NAME))
    found = _device(device, driver)
    graphs = [graph.member for graph in manifest.graphs() if graph.backend == "cuda"]
    if found is None or not graphs:
        why = "no CUDA device" if found is None else "the bundle has no CUDA graph"
        return {"device": {"device": found.name if found else "none", "runs": f"the CPU graphs: {why}"}}
    records = tuple(launch_records(manifest.kernels).values())
    return {
        "device": {
            "device": found.name,
            "compute capability": f"{found.capability[0]}.{found.capability[1]}",
            "driver": "as new as needed" if found.driver == _NEWEST_DRIVER else f"CUDA {_version(found.driver)}",
            "runs": ", ".join(graphs),
        },
        "kernels": _choices(records, found, launch_axes(manifest, config.windows.default))
        or {"GPU kernels": "none in this bundle: onnxruntime's operators run"},
    }


def launch_axes(manifest: Manifest, window: int) -> dict[str, int]:
    """The sizes of a round of one sequence with `window` drafts."""
    info = manifest.target.info
    kv_heads = info.kv_layers[0].n_kv_heads if info.kv_layers else 1
    rows = window + 1
    return {
        "rows": rows,
        "steps": window,
        "nodes": rows,
        "vocab": info.vocab_size,
        "kv_heads": kv_heads,
        "q_heads": info.n_heads,
        "packed_rows": info.n_heads // kv_heads * rows,
        "pools": 2 * len(info.kv_layers),
    }


def _choices(records: Sequence[LaunchRecord], device: CudaDevice, axes: dict[str, int]) -> dict[str, str]:
    kinds: dict[tuple[str, tuple[tuple[str, int | str], ...]], list[LaunchRecord]] = {}
    for record in records:
        kinds.setdefault((record.kernel, tuple(record.equals.items())), []).append(record)
    chosen = {}
    for (kernel, equals), group in kinds.items():
        sizes = {axis: 1 for record in group for axis in (*record.at_most, *_grid_axes(record))}
        label = ", ".join([kernel, *(f"{axis} {value}" for axis, value in equals)])
        choice = KernelChoice(tuple(group), device)
        try:
            record = choice.choose(kernel, {**sizes, **axes, **dict(equals)})
        except KernelError as error:
            refused = len(choice.refused) == len(group)
            chosen[label] = f"none: {'; '.join(dict.fromkeys(choice.refused.values())) if refused else error.hint}"
        else:
            chosen[label] = f"{record.variant} ({record.arch})"
    return chosen


def _grid_axes(record: LaunchRecord) -> list[str]:
    return [factor.axis for dimension in record.grid for factor in dimension]


def _device(text: str, driver: str | None) -> CudaDevice | None:
    if text == "none":
        return None
    if (ordinal := parse_number(text)) is not None:
        if driver is not None:
            raise RequestError("--driver", "is for a device that is named by its architecture", "leave it out")
        with CudaDriver(ordinal) as real:
            return real.device
    if text not in _DEVICES:
        known = ", ".join(_DEVICES)
        raise RequestError("--device", f"none, a device's number or one of {known} is required, got {text!r}")
    arch = ARCHITECTURES[text]
    assert arch.capability is not None
    return CudaDevice(
        name=f"{text}, such as {arch.reference.name}",
        capability=arch.capability,
        multiprocessors=arch.reference.multiprocessors,
        shared_per_block=arch.shared_per_block,
        driver=_NEWEST_DRIVER if driver is None else _driver_number(driver),
    )


def _driver_number(text: str) -> int:
    parts = [parse_number(part) for part in text.split(".")]
    if len(parts) > 2 or None in parts:
        raise RequestError("--driver", f"a CUDA version such as 12.4 is required, got {text[:80]!r}")
    major, minor = (*parts, 0)[:2]
    return 1000 * (major or 0) + 10 * (minor or 0)


def _needs(records: Iterable[LaunchRecord]) -> str:
    least = max(record.minimum_driver for record in records)
    return f", driver of CUDA {_version(least)} or newer" if least else ""


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}" if number else "-"


def _counts(opcodes: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in opcodes.items()) or "-"
