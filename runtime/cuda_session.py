"""One forward graph on a CUDA device, queued without waiting: what goes in is one copy, what comes out stays there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from dsc.bundle_schema.errors import GenerationError
from dsc.bundle_schema.tensors import DType
from dsc.runtime.cuda_stream import CudaStream
from dsc.runtime.device_arena import DevicePool
from dsc.runtime.device_attention import ONNX_TYPES, DeviceAttention
from dsc.runtime.host import ORT_ERRORS
from dsc.runtime.session import check_ports, check_rows

_WORD = 8
_ALIGN = 32  # words: what the device's allocator itself promises


@dataclass(frozen=True)
class DeviceLogits:
    """Logits [n, V] in float32 on the device, and the tokens that the graph read; the next forward overwrites both.

    Attributes:
        address: of the first row.
        ids_address: of the graph's input tokens, int64; the last `n` rows are what the logits follow.
        n_tokens: how many tokens the graph read.
    """

    stream: CudaStream
    address: int
    n: int
    vocab_size: int
    ids_address: int
    n_tokens: int

    def drafts_address(self) -> int:
        """Of the n - 1 tokens that the rows after the first one read: the drafts of a block."""
        return self.ids_address + _WORD * (self.n_tokens - self.n + 1) if self.n > 1 else self.ids_address

    def host(self) -> NDArray[np.float32]:
        """All rows [n, V], copied; waits."""
        rows = np.empty((self.n, self.vocab_size), np.float32)
        self.stream.download(rows, self.address)
        return rows

    def __getitem__(self, row: int) -> NDArray[np.float32]:
        """One row [V], copied; waits."""
        copied = np.empty(self.vocab_size, np.float32)
        self.stream.download(copied, self.address + 4 * row * self.vocab_size)
        return copied


class CudaForward:
    """Runs rows of tokens through a forward graph whose KV rows are written in place on the device.

    Inputs of one call lie side by side in one block, which is uploaded in one copy; `total_length`, which the attention
    operator reads on the host, stays there. A call returns before the device has begun.

    Args:
        session: the graph's session on the CUDA provider, with `stream` as its stream.
        pools: graph input name -> this model's part of the arena.
        vocab_size: width of a logits row.
        max_rows: most rows that one call returns logits for.
        chunk: most rows of one call.
        where: the graph's name in errors.
        stream: that of the session.
        attention: the kernels that the graph launches itself, which are told the length of the sequence.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        pools: Mapping[str, DevicePool],
        vocab_size: int,
        max_rows: int,
        chunk: int,
        where: str,
        stream: CudaStream,
        attention: DeviceAttention | None = None,
    ) -> None:
        self.where = where
        self.chunk = max(chunk, max_rows)
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self.stream = stream
        self._session = session
        self._pools = pools
        self._block = _InputBlock(stream, self.chunk, max_rows)
        self._logits = stream.allocate(4 * max_rows * vocab_size)
        self._attention = attention  # must live as long as the session
        self._total = np.zeros((), np.int32) if attention is None else attention.total_length
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._declared = [value.name for value in session.get_inputs()]
        self._outputs = [value.name for value in session.get_outputs()]
        check_ports(where, self._declared, self._outputs, (*_InputBlock.NAMES, "total_length"), pools)
        self._bindings: dict[tuple[int, int, int], ort.IOBinding] = {}

    def forward(self, tokens: Sequence[int], past: int, n_logits: int) -> DeviceLogits:
        """Queue `tokens` at positions past, past + 1, ... and return where the last `n_logits` rows' logits will be.

        Args:
            tokens: the new rows.
            past: valid KV rows before the call.
            n_logits: 1 .. max_rows.

        Raises:
            GenerationError: too many rows, or onnxruntime cannot queue them.
        """
        n = len(tokens)
        check_rows(self.where, n, n_logits, self.chunk, self.max_rows)
        self.stream.driver.make_current()
        addresses = self._block.upload(tokens, past, n_logits)
        self._run((n, n_logits), addresses, past + n)
        return DeviceLogits(self.stream, self._logits, n_logits, self.vocab_size, addresses["input_ids"], n)

    def forward_queued(self, addresses: Mapping[str, int], past: int) -> DeviceLogits:
        """Queue one row whose inputs lie on the device already, or will when it is their turn.

        Args:
            addresses: of every input but the pools; few different ones, since each gets a binding of its own.
            past: valid KV rows before the call.
        """
        self._run((1, 1), addresses, past + 1)
        return DeviceLogits(self.stream, self._logits, 1, self.vocab_size, addresses["input_ids"], 1)

    def _run(self, shape: tuple[int, int], addresses: Mapping[str, int], total: int) -> None:
        self._total[()] = total
        try:
            self._session.run_with_iobinding(self._binding(shape, addresses), self._options)
        except ORT_ERRORS as error:
            what = f"onnxruntime {ort.__version__} failed on {shape[0]} rows after {total - shape[0]}: {error}"
            raise GenerationError(self.where, what, "`dsc check` says whether the bundle is damaged") from error

    def _binding(self, shape: tuple[int, int], addresses: Mapping[str, int]) -> ort.IOBinding:
        key = (*shape, addresses["input_ids"])
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bind(*shape, addresses)
            if shape[0] <= self.max_rows:  # prompts come in any length: keeping theirs would grow without bound
                self._bindings[key] = binding
        return binding

    def _bind(self, n: int, n_logits: int, addresses: Mapping[str, int]) -> ort.IOBinding:
        shapes = {
            "input_ids": (1, n),
            "position_ids": (1, n),
            "logit_rows": (n_logits,),
            "past_lengths": (1,),
            "last_rows": (1,),
        }
        device = self.stream.driver.ordinal
        binding = self._session.io_binding()
        for name in self._declared:
            if name == "total_length":
                binding.bind_input(name, "cpu", 0, np.int32, (), self._total.ctypes.data)
                continue
            pool = self._pools.get(name)
            kind = ONNX_TYPES[pool.dtype if pool else _InputBlock.NAMES[name]]
            address = pool.address if pool else addresses[name]
            binding.bind_input(name, "cuda", device, kind, pool.shape if pool else shapes[name], address)
        for name in self._outputs:
            pool = self._pools.get(name.replace("_out.", "."))
            if name == "logits":
                shape = (1, n_logits, self.vocab_size)
                binding.bind_output(name, "cuda", device, np.float32, shape, self._logits)
            elif pool is not None:
                binding.bind_output(name, "cuda", device, ONNX_TYPES[pool.dtype], pool.shape, pool.address)
        return binding


class _InputBlock:
    """The graph inputs of a call, side by side on the host and in the same places on the device.

    Lengths and logit rows come first, in room for the most rows; then the tokens, and right behind as many as there are
    their positions, so that a call of few rows is a short copy.
    """

    NAMES: ClassVar[dict[str, DType]] = {
        "past_lengths": DType.INT32,
        "last_rows": DType.INT32,
        "logit_rows": DType.INT64,
        "input_ids": DType.INT64,
        "position_ids": DType.INT64,
    }

    def __init__(self, stream: CudaStream, chunk: int, max_rows: int) -> None:
        self._stream = stream
        self._ids = 2 * _ALIGN + _aligned(max_rows)
        self._host = np.zeros(self._ids + 2 * _aligned(chunk), np.int64)
        self._device = stream.allocate(self._host.nbytes)

    def upload(self, tokens: Sequence[int], past: int, n_logits: int) -> dict[str, int]:
        """Queue the copy of a call's inputs; returns where each will lie on the device."""
        n = len(tokens)
        words = {"past_lengths": 0, "last_rows": _ALIGN, "logit_rows": 2 * _ALIGN, "input_ids": self._ids}
        words["position_ids"] = positions = self._ids + _aligned(n)
        host = self._host
        host[0] = past  # little-endian: the first half of the word is the int32
        host[_ALIGN] = past + n - 1
        host[2 * _ALIGN : 2 * _ALIGN + n_logits] = np.arange(n - n_logits, n)
        host[self._ids : self._ids + n] = tokens
        host[positions : positions + n] = np.arange(past, past + n)
        self._stream.upload(self._device, host[: positions + n])
        return {name: self._device + _WORD * word for name, word in words.items()}


def _aligned(words: int) -> int:
    return -(-words // _ALIGN) * _ALIGN
