"""One forward graph, run without allocating: inputs, logits and KV pools are bound once by address."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from dsc.bundle_schema.errors import BundleError, GenerationError
from dsc.runtime.host import ORT_ERRORS

MOST_BINDINGS = 128
"""Shapes of calls whose bindings are kept; more than one decoding repeats, fewer than an engine may come across."""

_POOLS = ("k_pool.", "v_pool.")


@dataclass(frozen=True)
class Rows:
    """What one sequence brings to a run.

    Attributes:
        slot: where its keys and values live.
        tokens: at positions past, past + 1, ...
        past: valid KV rows before the run.
        n_logits: of the last tokens; 0 when none are wanted.
    """

    slot: int
    tokens: Sequence[int]
    past: int
    n_logits: int


class KvPools(Protocol):
    """Where a model's keys and values live: graph input name -> array [slots, Hkv, rows, D]."""

    @property
    def pools(self) -> dict[str, NDArray[np.generic]]:
        """One entry a pool."""


def check_ports(
    where: str, inputs: Sequence[str], outputs: Collection[str], known: Collection[str], pools: Collection[str]
) -> None:
    """Raise BundleError for an input that nobody would feed, and for a pool or logits that the graph lacks."""
    for name in inputs:
        if name not in known and name not in pools:
            raise BundleError(where, f"graph input {name!r} is neither a known input nor a planned pool")
    for name in pools:
        if name not in inputs:
            raise BundleError(where, f"the graph input {name!r} is required, the plan has a pool for it")
    for name in ("logits", *(pool.replace("_pool.", "_pool_out.") for pool in pools)):
        if name not in outputs:
            raise BundleError(where, f"the graph output {name!r} is required, it has {', '.join(outputs)}")


def check_rows(where: str, n_rows: int, n_logits: int, chunk: int, max_rows: int) -> None:
    """Raise GenerationError for more rows of one call, or of its logits, than there is room for."""
    if not 1 <= n_logits <= min(n_rows, max_rows) or n_rows > chunk:
        raise GenerationError(where, f"at most {chunk} rows and {max_rows} logits, got {n_rows} and {n_logits}")


class ForwardSession:
    """Runs rows of tokens through a forward graph whose KV rows are written in place.

    A number of rows that decoding repeats gets its own binding, made once; a step then costs three small copies and the
    call. Only the inputs that the graph declares are fed, each from this model's own state.

    Args:
        session: the graph's session.
        pools: this model's part of the arena; more than one slot needs a graph that packs rows.
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
        self._n_slots = next((pool.shape[0] for pool in self._pools.values()), 1)
        self._inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.zeros(self.chunk, np.int64),
            "position_ids": np.zeros(self.chunk, np.int64),
            "logit_rows": np.zeros(max_rows, np.int64),
            "past_lengths": np.zeros(self._n_slots, np.int32),
            "row_offsets": np.zeros(self._n_slots + 1, np.int32),
        }
        self._logits = np.zeros((max_rows, vocab_size), np.float32)
        self._declared = [value.name for value in session.get_inputs()]
        self._outputs = [value.name for value in session.get_outputs()]
        check_ports(self.where, self._declared, self._outputs, self._inputs, self._pools)
        self._bindings: dict[tuple[int, int], ort.IOBinding] = {}

    @property
    def packs_rows(self) -> bool:
        """Whether one run takes rows of several sequences."""
        return "row_offsets" in self._declared

    def over(self, pools: KvPools, max_rows: int, chunk: int) -> ForwardSession:
        """The same graph and weights over other pools."""
        return ForwardSession(self._session, pools, self._logits.shape[1], max_rows, chunk, self.where)

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
        check_rows(self.where, n, n_logits, self.chunk, self._max_rows)
        self._inputs["input_ids"][:n] = tokens
        self._inputs["position_ids"][:n] = np.arange(past, past + n)
        self._inputs["logit_rows"][:n_logits] = np.arange(n - n_logits, n)
        self._inputs["past_lengths"][0] = past
        self._inputs["row_offsets"][1] = n
        self._run(n, n_logits, past)
        return self._logits[:n_logits]

    def forward_packed(self, sequences: Sequence[Rows]) -> list[NDArray[np.float32]]:
        """Run the rows of several sequences at once; only a graph that packs rows can.

        Args:
            sequences: each in a slot of its own, in rising order of slots.

        Returns:
            [n_logits, V] for each sequence, views that the next call overwrites.

        Raises:
            GenerationError: too many rows, or onnxruntime cannot compute them.
        """
        inputs = self._inputs
        n_rows = sum(len(rows.tokens) for rows in sequences)
        n_logits = max(sum(rows.n_logits for rows in sequences), 1)  # a graph has no form without logits
        if n_rows > self.chunk or n_logits > self._max_rows:
            raise GenerationError(
                self.where, f"at most {self.chunk} rows and {self._max_rows} logits, got {n_rows} and {n_logits}"
            )
        counts, lengths = np.zeros(self._n_slots, np.int32), inputs["past_lengths"]
        lengths[:] = 0
        ids: list[int] = []
        wanted: list[int] = []
        for rows in sequences:
            n = len(rows.tokens)
            inputs["position_ids"][len(ids) : len(ids) + n] = np.arange(rows.past, rows.past + n)
            ids += rows.tokens
            wanted += range(len(ids) - rows.n_logits, len(ids))
            counts[rows.slot], lengths[rows.slot] = n, rows.past
        inputs["input_ids"][:n_rows] = ids
        inputs["logit_rows"][:n_logits] = wanted or [n_rows - 1]
        np.cumsum(counts, out=inputs["row_offsets"][1:])
        self._run(n_rows, n_logits, int(lengths.max()))
        ends = np.cumsum([rows.n_logits for rows in sequences])
        return [self._logits[end - rows.n_logits : end] for rows, end in zip(sequences, ends, strict=True)]

    def _run(self, n: int, n_logits: int, past: int) -> None:
        try:
            self._session.run_with_iobinding(self._binding(n, n_logits))
        except ORT_ERRORS as error:
            what = f"onnxruntime {ort.__version__} failed on {n} rows after {past}: {error}"
            raise GenerationError(self.where, what, "`dsc check` says whether the bundle is damaged") from error

    def _binding(self, n: int, n_logits: int) -> ort.IOBinding:
        binding = self._bindings.get((n, n_logits))
        if binding is None:
            binding = self._bind(n, n_logits)
            if n <= self._max_rows:  # prompts come in any length
                if len(self._bindings) == MOST_BINDINGS:
                    del self._bindings[next(iter(self._bindings))]  # the oldest
                self._bindings[n, n_logits] = binding
        return binding

    def _bind(self, n: int, n_logits: int) -> ort.IOBinding:
        shapes = {
            "input_ids": (1, n),
            "position_ids": (1, n),
            "logit_rows": (n_logits,),
            "past_lengths": (self._n_slots,),
            "row_offsets": (self._n_slots + 1,),
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
