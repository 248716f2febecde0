"""One forward graph, run without allocating: inputs, logits and KV pools are bound once by address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from dsc.bundle_schema.errors import BundleError, GenerationError
from dsc.runtime.host import ORT_ERRORS

_POOLS = ("k_pool.", "v_pool.")


class KvPools(Protocol):
    """Where a model's keys and values live: graph input name -> array [1, Hkv, rows, D]."""

    @property
    def pools(self) -> dict[str, NDArray[np.generic]]:
        """One entry a pool."""


class ForwardSession:
    """Runs rows of tokens through a forward graph whose KV rows are written in place.

    A number of rows that decoding repeats gets its own binding, made once; a step then costs three small copies and the
    call. Only the inputs that the graph declares are fed, each from this model's own state.

    Args:
        session: the graph's session.
        pools: this model's part of the arena.
        vocab_size: width of a logits row.
        max_rows: most rows that one call returns logits for.
        chunk: most rows of one call.
        where: the graph's name in errors.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        pools: KvPools,
        vocab_size: int,
        max_rows: int,
        chunk: int,
        where: str,
    ) -> None:
        self.where = where
        self.chunk = max(chunk, max_rows)
        self._session = session
        self._max_rows = max_rows
        self._pools = pools.pools
        self._inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.zeros(self.chunk, np.int64),
            "position_ids": np.zeros(self.chunk, np.int64),
            "logit_rows": np.zeros(max_rows, np.int64),
            "past_lengths": np.zeros(1, np.int32),
        }
        self._logits = np.zeros((max_rows, vocab_size), np.float32)
        self._declared = [value.name for value in session.get_inputs()]
        self._outputs = [value.name for value in session.get_outputs()]
        self._check_names()
        self._bindings: dict[tuple[int, int], ort.IOBinding] = {}

    def _check_names(self) -> None:
        for name in self._declared:
            if name not in self._inputs and name not in self._pools:
                raise BundleError(self.where, f"graph input {name!r} is neither a known input nor a planned pool")

    def forward(self, tokens: Sequence[int], past: int, n_logits: int) -> NDArray[np.float32]:
        """Run `tokens` at positions past, past + 1, ... and return the logits of the last `n_logits` of them.

        Args:
            tokens: the new rows.
            past: valid KV rows before the call.
            n_logits: 1 .. max_rows.

        Returns:
            [n_logits, V], a view that the next call overwrites.

        Raises:
            GenerationError: too many rows, or onnxruntime cannot compute them.
        """
        n = len(tokens)
        if not 1 <= n_logits <= min(n, self._max_rows) or n > self.chunk:
            raise GenerationError(
                self.where, f"at most {self.chunk} rows and {self._max_rows} logits, got {n} and {n_logits}"
            )
        self._inputs["input_ids"][:n] = tokens
        self._inputs["position_ids"][:n] = np.arange(past, past + n)
        self._inputs["logit_rows"][:n_logits] = np.arange(n - n_logits, n)
        self._inputs["past_lengths"][0] = past
        try:
            self._session.run_with_iobinding(self._binding(n, n_logits))
        except ORT_ERRORS as error:
            what = f"onnxruntime {ort.__version__} failed on {n} rows after {past}: {error}"
            raise GenerationError(self.where, what, "`dsc check` says whether the bundle is damaged") from error
        return self._logits[:n_logits]

    def _binding(self, n: int, n_logits: int) -> ort.IOBinding:
        binding = self._bindings.get((n, n_logits))
        if binding is None:
            binding = self._bind(n, n_logits)
            if n <= self._max_rows:  # prompts come in any length: keeping their bindings would grow without bound
                self._bindings[n, n_logits] = binding
        return binding

    def _bind(self, n: int, n_logits: int) -> ort.IOBinding:
        shapes = {
            "input_ids": (1, n),
            "position_ids": (1, n),
            "logit_rows": (n_logits,),
            "past_lengths": (1,),
        }
        binding = self._session.io_binding()
        for name in self._declared:
            array: NDArray[Any] = self._pools[name] if name in self._pools else self._inputs[name]
            shape = array.shape if name in self._pools else shapes[name]
            binding.bind_input(name, "cpu", 0, array.dtype, shape, array.ctypes.data)
        for name in self._outputs:
            if name == "logits":
                shape = (1, n_logits, self._logits.shape[1])
                binding.bind_output(name, "cpu", 0, np.float32, shape, self._logits.ctypes.data)
            elif name.startswith(tuple(pool.replace(".", "_out.") for pool in _POOLS)):
                array = self._pools[name.replace("_out.", ".")]
                binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        return binding
