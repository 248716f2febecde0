"""A draft model on the device that reads its own drafts there: one wait for a whole block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsc.runtime.cached_model import CachedModel, RowWatch
from dsc.runtime.cuda_session import CudaForward, DeviceLogits
from dsc.runtime.cuda_stream import CudaStream
from dsc.runtime.device_kernels import VerifyTail
from dsc.runtime.device_verify import DeviceTail
from dsc.runtime.kv_arena import KvZone

_SLOT_WORDS = 32  # 256 bytes: as aligned as an allocation
_PLACES = {"input_ids": 0, "position_ids": 4, "logit_rows": 8, "last_rows": 12, "past_lengths": 16}


class DeviceDraftModel(CachedModel):
    """Drafts greedily without a word to the host: each draft is written where the next forward reads its token.

    Args:
        session: the draft's forward graph, bound to the pools of `zone`.
        zone: the draft's cache.
        max_length: most tokens that it may read.
        tail: chooses tokens from the draft's logits.
        max_drafts: most drafts of a block.
    """

    def __init__(self, session: CudaForward, zone: KvZone, max_length: int, tail: DeviceTail, max_drafts: int) -> None:
        super().__init__(session, zone, max_length)
        self._forward = session
        self._tail = tail
        self._steps = _Steps(session.stream, max_drafts)

    def draft(self, rows: Sequence[int], count: int, n_shared: int, watch: RowWatch | None) -> list[int]:
        """See `CachedModel.draft`. Step by step where every row is watched on the host, or no kernel chooses."""
        rule = VerifyTail(batch=1, steps=0, vocab=n_shared)
        if watch is not None or self._tail.refusal(rule):
            return super().draft(rows, count, n_shared, watch)
        steps = self._steps
        logits = self._forward.forward(rows, self.length, 1)
        self.commit(len(rows), len(rows))
        steps.upload(self.length, count)
        self._choose(rule, logits, 0)
        for step in range(1, count):
            logits = self._forward.forward_queued(steps.inputs(step - 1), self.length)
            self.commit(1, 1)
            self._choose(rule, logits, step)
        return steps.read(count)

    def _choose(self, rule: VerifyTail, logits: DeviceLogits, step: int) -> None:
        """Queue writing the most likely token to the step's place."""
        to = self._steps.inputs(step)["input_ids"]
        none = {"drafts_ptr": logits.ids_address, "lengths_ptr": self._tail.count_address(0)}
        self._tail.launch(rule, logits, {**none, "next_ptr": to})


class _Steps:
    """What the forwards of a block read, a slot for each: its token, which the device writes, and its position."""

    def __init__(self, stream: CudaStream, max_steps: int) -> None:
        self._stream = stream
        self._host = np.zeros((max_steps, _SLOT_WORDS), np.int64)
        self._device = stream.allocate(self._host.nbytes)
        self._inputs = [
            {name: self._device + 8 * (_SLOT_WORDS * step + word) for name, word in _PLACES.items()}
            for step in range(max_steps)
        ]

    def inputs(self, step: int) -> dict[str, int]:
        """Addresses of a step's graph inputs."""
        return self._inputs[step]

    def upload(self, past: int, count: int) -> None:
        """Queue the positions of `count` steps after `past` rows."""
        for name in ("position_ids", "last_rows", "past_lengths"):
            self._host[:count, _PLACES[name]] = np.arange(past, past + count)
        self._stream.upload(self._device, self._host[:count])

    def read(self, count: int) -> list[int]:
        """The tokens of `count` steps; waits."""
        self._stream.download(self._host[:count], self._device)
        ids: list[int] = self._host[:count, _PLACES["input_ids"]].tolist()
        return ids
