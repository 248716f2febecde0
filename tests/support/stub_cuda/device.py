"""What the stub's device computes: the verdict's kernels in NumPy, and a scripted language model in place of graphs.

The graphs of onnxruntime launch kernels that do nothing, so logits are written here, by a rule that reads every token
of the sequence: a wrong, stale or misplaced row changes the output.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from math import ceil
from typing import Any

import numpy as np
from scripted_lm import reference_logits

from dsc.runtime.cuda_session import CudaForward
from dsc.runtime.sampling import SamplingParams
from dsc.runtime.verify import SampledChooser

_LAUNCHED = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p))


def memory(address: int, n: int, dtype: Any) -> np.ndarray:
    """Device memory, which is the host's, as an array."""
    raw = (ctypes.c_char * (n * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(raw, dtype, n)


class Device:
    """The stub's driver, executing.

    Args:
        table: the scripted rule of a forward graph: (``target`` or ``draft``, width of a row) -> table.
        capability: compute capability of the device.
    """

    def __init__(self, table: Callable[[str, int], np.ndarray], capability: tuple[int, int]) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.driver.mock_events.restype = ctypes.c_char_p
        self.driver.mock_device(13000, *capability)
        self.table = table
        self.read: dict[str, list[int]] = {}
        self.truncation: dict[str, float] = {}
        self._callback = _LAUNCHED(self._launched)
        self.driver.mock_on_launch(self._callback)
        forward, queued = CudaForward.forward, CudaForward.forward_queued
        device = self

        def spied(self: CudaForward, tokens: Any, past: int, n_logits: int) -> Any:
            logits = forward(self, tokens, past, n_logits)
            assert memory(logits.ids_address, len(tokens), np.int64).tolist() == list(tokens)
            device.computed(self, list(tokens), past, logits)
            return logits

        def spied_queued(self: CudaForward, addresses: Any, past: int) -> Any:
            logits = queued(self, addresses, past)
            assert memory(addresses["position_ids"], 1, np.int64)[0] == past
            assert memory(addresses["last_rows"], 1, np.int32)[0] == past
            device.computed(self, memory(addresses["input_ids"], 1, np.int64).tolist(), past, logits)
            return logits

        CudaForward.forward, CudaForward.forward_queued = spied, spied_queued

    def events(self) -> list[str]:
        """What happened since the last call."""
        lines = self.driver.mock_events().decode().splitlines()
        self.driver.mock_reset()
        return lines

    def computed(self, graph: CudaForward, tokens: list[int], past: int, logits: Any) -> None:
        """Write the logits that a forward would give."""
        name = graph.where.partition("/")[0]
        read = self.read.setdefault(name, [])
        assert past <= len(read)
        read[past:] = tokens
        table = self.table(name, logits.vocab_size)
        rows = memory(logits.address, logits.n * logits.vocab_size, np.float32).reshape(logits.n, -1)
        for i in range(logits.n):
            rows[i] = reference_logits(table, read[: len(read) - logits.n + 1 + i])

    def _launched(self, entry: bytes, grid: Any, params: Any) -> None:
        at = lambda i, kind: ctypes.cast(params[i], ctypes.POINTER(kind)).contents.value  # noqa: E731
        pointer = lambda i: at(i, ctypes.c_uint64)  # noqa: E731
        number = lambda i: at(i, ctypes.c_int32)  # noqa: E731
        getattr(self, "_" + entry.decode(), lambda *_: None)(grid, pointer, number)

    def _row_stats(self, grid: Any, pointer: Any, number: Any) -> None:
        rows, parts, vocab = grid[0], grid[1], number(5)
        logits = memory(pointer(0), rows * vocab, np.float32).reshape(rows, vocab)
        best = memory(pointer(2), rows * parts, np.float32).reshape(rows, parts)
        token = memory(pointer(3), rows * parts, np.int32).reshape(rows, parts)
        share = ceil(ceil(vocab / parts) / 2048) * 2048
        for part in range(parts):
            piece = logits[:, part * share : (part + 1) * share]
            best[:, part], token[:, part] = piece.max(axis=1), part * share + piece.argmax(axis=1)
        self.truncation = {}

    def _row_cutoff(self, grid: Any, pointer: Any, number: Any) -> None:
        rows, vocab = grid[0], number(8)
        logits = memory(pointer(0), rows * vocab, np.float32).reshape(rows, vocab)
        memory(pointer(5), rows, np.float32)[:] = logits.max(axis=1)
        found = {"top_k": (2, np.int32), "top_p": (3, np.float32), "min_p": (4, np.float32)}
        self.truncation = {name: memory(pointer(i), rows, kind)[0].item() for name, (i, kind) in found.items()}

    def _accept_greedy(self, grid: Any, pointer: Any, number: Any) -> None:
        steps, parts = number(7), number(8)
        best = memory(pointer(0), (steps + 1) * parts, np.float32).reshape(-1, parts)
        token = memory(pointer(1), (steps + 1) * parts, np.int32).reshape(-1, parts)
        chosen = [int(token[row, best[row].argmax()]) for row in range(steps + 1)]
        drafts = memory(pointer(2), steps, np.int64)
        assert memory(pointer(3), 1, np.int32)[0] == steps
        accepted = next((i for i in range(steps) if drafts[i] != chosen[i]), steps)
        memory(pointer(4), 1, np.int32)[0] = accepted
        memory(pointer(5), 1, np.int64)[0] = chosen[accepted]

    def _accept_sampled(self, grid: Any, pointer: Any, number: Any) -> None:
        rows, steps, vocab = grid[0], number(13), number(15)
        assert steps == 0
        logits = memory(pointer(0), rows * vocab, np.float32).reshape(rows, vocab)
        uniforms, temperature = memory(pointer(5), rows, np.float32), memory(pointer(6), 1, np.float32)[0]
        chooser = SampledChooser(SamplingParams(temperature=float(temperature), **self.truncation))
        for row in range(rows):
            memory(pointer(11), rows, np.int64)[row] = chooser.choose(logits[row], float(uniforms[row]))
