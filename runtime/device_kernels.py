"""A bundle's kernels on one CUDA device: bound once to shapes and addresses, then queued step after step.

Tensors of a decoding loop keep their addresses (the pool and the logits are allocated once), so a step's launches
are bound when the shape is first seen and afterwards cost one driver call each. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from dsc.bundle_schema.errors import KernelError
from dsc.kernels.launch_record import LaunchRecord
from dsc.runtime.cuda_driver import CudaDriver, PreparedLaunch
from dsc.runtime.kernel_choice import KernelChoice

_MAX_PARTS = {"attention": 64, "verify": 32}
_STATS_TOKENS = 8192  # a part of a row's statistics reads at least this many logits
_MODES = ("greedy", "sampled")


@dataclass(frozen=True)
class BoundLaunch:
    """One launch with its grid and arguments; `run` queues it on a stream."""

    prepared: PreparedLaunch
    blocks: tuple[int, int, int]
    values: tuple[int | float, ...]

    def run(self, stream: int) -> None:
        """Queue the launch."""
        self.prepared(self.blocks, stream, self.values)


class DeviceKernels:
    """Kernels by member name on an open device.

    Args:
        driver: the device.
        records: member name -> launch record, as in the manifest.
        read: reads a member's code from the bundle.

    Attributes:
        choice: which variants run here, and why the others do not.
    """

    def __init__(self, driver: CudaDriver, records: Mapping[str, LaunchRecord], read: Callable[[str], bytes]) -> None:
        self.driver = driver
        self.choice = KernelChoice(tuple(records.values()), driver.device)
        self._members = {(record.variant, record.arch): member for member, record in records.items()}
        self._read = read

    def bind(self, kernel: str, axes: Mapping[str, int | str], values: Mapping[str, int | float]) -> BoundLaunch:
        """Choose a variant for these shapes, types and addresses and set its arguments.

        Raises:
            KernelError: no variant serves them (with every reason), or an argument has no value.
            HostError: the driver refuses the image.
        """
        pointers = {name: value for name, value in values.items() if isinstance(value, int)}
        record = self.choice.choose(kernel, axes, pointers)
        missing = [arg.name for arg in record.args if arg.name not in values]
        if missing:
            raise KernelError(record.variant, f"the argument {missing[0]} has no value")
        prepared = self.load(record)
        sizes = {axis: size for axis, size in axes.items() if isinstance(size, int)}
        return BoundLaunch(prepared, record.blocks(sizes), tuple(values[arg.name] for arg in record.args))

    def load(self, record: LaunchRecord) -> PreparedLaunch:
        """A variant on the device.

        Raises:
            HostError: the driver refuses the image.
        """
        return self.driver.prepare(record, self._read(self._members[record.variant, record.arch]))


def attention_parts(programs: int, length: int, multiprocessors: int, tile_keys: int = 128) -> int:
    """Into how many parts to cut the KV: the device holds two programs each at once and shall have no second round of
    a few; a part has at least four tiles.

    Args:
        programs: programs of an uncut launch, sequences x KV heads x tiles of query rows.
        length: the longest sequence.
        multiprocessors: of the device.
        tile_keys: keys of a tile.
    """
    wanted = 2 * multiprocessors // max(programs, 1)
    worthwhile = max(length // (4 * tile_keys), 1)
    return max(min(wanted, worthwhile, _MAX_PARTS["attention"]), 1)


def verify_parts(rows: int, vocab: int, multiprocessors: int) -> int:
    """Into how many parts to cut each row of logits for its statistics."""
    wanted = ceil(4 * multiprocessors / max(rows, 1))
    return max(min(wanted, ceil(vocab / _STATS_TOKENS), _MAX_PARTS["verify"]), 1)


@dataclass(frozen=True)
class VerifyTail:
    """Shape and rule of the verdict: `steps` drafts at most for each of `batch` sequences."""

    batch: int
    steps: int
    vocab: int
    mode: str = "greedy"
    proposal: str = "point_mass"
    rule: str = "token"
    truncated: bool = False
    width: int = 0

    def parts(self, multiprocessors: int) -> int:
        """Into how many parts each row of logits is cut for its statistics."""
        return 1 if self.truncated else verify_parts(self.batch * (self.steps + 1), self.vocab, multiprocessors)

    def scratch_nbytes(self, multiprocessors: int) -> dict[str, int]:
        """Bytes of the scratch buffers by argument name."""
        rows = self.batch * (self.steps + 1)
        parts = self.parts(multiprocessors)
        return {"best_ptr": 4 * rows * parts, "token_ptr": 4 * rows * parts, "sum_ptr": 4 * rows * parts} | {
            "cut_ptr": 4 * rows
        }


def bind_verify(kernels: DeviceKernels, tail: VerifyTail, addresses: Mapping[str, int]) -> tuple[BoundLaunch, ...]:
    """The two launches of the verdict, in order: statistics of every row, then accept and draw.

    Args:
        kernels: of the bundle.
        tail: shape and rule.
        addresses: device addresses by argument name; those that the rule does not use may be left out.

    Raises:
        KernelError: the mode is unknown, or no variant serves the shape.
    """
    if tail.mode not in _MODES:
        raise KernelError("verify", f"mode must be one of {', '.join(_MODES)}, got {tail.mode!r}")
    rows = tail.steps + 1
    parts = tail.parts(kernels.driver.device.multiprocessors)
    sampled = tail.mode == "sampled"
    unused = dict.fromkeys(("q_ptr", "q_ids_ptr", "cut_ptr", "sum_ptr", "token_ptr", "temperature_ptr"), 0)
    numbers = {"vocab": tail.vocab, "rows": rows, "steps": tail.steps, "parts": parts, "width": tail.width}
    values = {**unused, **addresses, **numbers}
    axes: dict[str, int | str] = {"batch": tail.batch, **numbers}
    first: dict[str, int | str] = {"stage": "cutoff"}
    if not tail.truncated:
        first = {"stage": "stats", "sums": int(sampled)}
    second: dict[str, int | str] = {"stage": "accept", "mode": tail.mode}
    if sampled:
        second |= {"proposal": tail.proposal, "rule": tail.rule, "truncated": int(tail.truncated)}
    return tuple(kernels.bind("dspark_speculative_verify", {**axes, **stage}, values) for stage in (first, second))
