"""The verdict on the device: logits stay there, and a few numbers come back.

A greedy block is judged whole: how many drafts hold, and which token follows. In a sampled block every row's token is
drawn with the draw of its own position, and a draft holds if it is what was drawn, as in `dsc.runtime.verify`: the
output is a function of prompt and seed alone, with speculation and without. It is computed from float32 sums, so that
a seed gives another sample of the same distribution than it does on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsc.bundle_schema.errors import KernelError
from dsc.runtime.cuda_session import DeviceLogits
from dsc.runtime.cuda_stream import CudaStream
from dsc.runtime.decode import Verdict
from dsc.runtime.device_kernels import BoundLaunch, DeviceKernels, VerifyTail, bind_verify
from dsc.runtime.sampling import SamplingParams
from dsc.runtime.verify import require_finite

_MAX_PARTS = 32  # of a row, for its statistics
_SCRATCH = ("token_ptr", "sum_ptr", "cut_ptr", "cause_ptr")
_REQUEST = ("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "lengths_ptr", "uniforms_ptr")


class DeviceTail:
    """The verdict's kernels and their memory, for blocks of up to `max_rows` rows of one model's logits.

    Args:
        kernels: the bundle's, on the device of `stream`.
        vocab_size: width of a logits row.
        max_rows: most rows of a block.

    Attributes:
        addresses: of results and scratch, by argument name.
        request_addresses: of a request's parameters and draws, one for each row.
        next_tokens: of the last verdict that was read, int64 [max_rows]; so are `accepted` int32 [max_rows] and
            `best` float32 [max_rows * parts], the highest logit of each part of each row.
    """

    def __init__(self, kernels: DeviceKernels, stream: CudaStream, vocab_size: int, max_rows: int) -> None:
        self.stream = stream
        self.max_rows = max_rows
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._bound: dict[tuple[VerifyTail, tuple[int, ...]], tuple[BoundLaunch, ...]] = {}
        self._refusals: dict[VerifyTail, str] = {}
        self._results = np.zeros(max_rows * (8 + 4 + 4 * _MAX_PARTS), np.uint8)
        self._results_at = stream.allocate(self._results.nbytes)
        self.next_tokens, self.accepted, self.best = _split(self._results, max_rows)
        part = 4 * max_rows * _MAX_PARTS
        scratch = stream.allocate(len(_SCRATCH) * part)
        self._counts_at = stream.allocate(4 * max_rows)
        stream.upload(self._counts_at, np.arange(max_rows, dtype=np.int32))
        request = stream.allocate(len(_REQUEST) * 4 * max_rows)
        self.request_addresses = {name: request + 4 * i * max_rows for i, name in enumerate(_REQUEST)}
        self.request_addresses["drafts_ptr"] = request  # there are none where every row is drawn
        self.addresses = {
            "next_ptr": self._results_at,
            "accepted_ptr": self._results_at + 8 * max_rows,
            "best_ptr": self._results_at + 12 * max_rows,
            **{name: scratch + i * part for i, name in enumerate(_SCRATCH)},
        }

    def launch(self, rule: VerifyTail, logits: DeviceLogits, more: dict[str, int]) -> None:
        """Queue the verdict of a block.

        Raises:
            KernelError: no kernel of the bundle serves this rule and shape on this device; every reason is named.
        """
        key = rule, (logits.address, *more.values())
        launches = self._bound.get(key)
        if launches is None:
            addresses = {**self.addresses, "logits_ptr": logits.address, **more}
            launches = self._bound[key] = bind_verify(self._kernels, rule, addresses)
        for launch in launches:
            launch.run(self.stream.handle)

    def read(self) -> None:
        """Wait for the verdict that was queued last, and read it."""
        self.stream.download(self._results, self._results_at)

    def count_address(self, count: int) -> int:
        """Address of an int32 that is `count`, below `max_rows`."""
        return self._counts_at + 4 * count

    def greedy_rule(self, n_drafts: int) -> VerifyTail:
        """Judge a block of greedy decoding."""
        return VerifyTail(batch=1, steps=n_drafts, vocab=self._vocab_size)

    def sampled_rule(self, n_rows: int, truncated: bool) -> VerifyTail:
        """Draw one token for each row."""
        return VerifyTail(batch=n_rows, steps=0, vocab=self._vocab_size, mode="sampled", truncated=truncated)

    def require_finite(self, rule: VerifyTail, n_rows: int) -> None:
        """Look at the best logit of each of the first `n_rows` rows of the verdict that was read.

        Raises:
            GenerationError: one is not finite.
        """
        parts = rule.parts(self._kernels.driver.device.multiprocessors)
        require_finite(self.best[: n_rows * parts].reshape(n_rows, parts).max(axis=1).min())

    def refusal(self, rule: VerifyTail) -> str:
        """Why the kernels do not serve a rule, or an empty string; found out once."""
        if rule not in self._refusals:
            self._refusals[rule] = self._try(rule)
        return self._refusals[rule]

    def _try(self, rule: VerifyTail) -> str:
        addresses = {**self.request_addresses, **self.addresses, "logits_ptr": self._results_at}  # as aligned as any
        try:
            bind_verify(self._kernels, rule, addresses)
        except KernelError as error:
            return str(error)
        return ""


def _split(results: NDArray[np.uint8], n: int) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Views of the packed results: next tokens, accepted counts, best logits."""
    return (
        results[: 8 * n].view(np.int64),
        results[8 * n : 12 * n].view(np.int32),
        results[12 * n :].view(np.float32),
    )


class DeviceGreedyVerifier:
    """Accepts drafts as long as they are the most likely token."""

    def __init__(self, tail: DeviceTail) -> None:
        self._tail = tail

    def verify(self, logits: DeviceLogits, drafts: Sequence[int], draws: NDArray[np.float64]) -> Verdict:
        """See `dsc.runtime.decode.Verifier`; the drafts are read where the graph read them, on the device.

        Raises:
            GenerationError: a row allows no token.
        """
        tail, n = self._tail, len(drafts)
        rule = tail.greedy_rule(n)
        tail.launch(rule, logits, {"drafts_ptr": logits.drafts_address(), "lengths_ptr": tail.count_address(n)})
        tail.read()
        accepted = int(tail.accepted[0])
        tail.require_finite(rule, accepted + 1)
        return Verdict(accepted, int(tail.next_tokens[0]))


class DeviceSampledVerifier:
    """Accepts drafts as long as they are what is drawn from the filtered distribution.

    Args:
        tail: of the target.
        params: a request's; its temperature is not zero.
    """

    def __init__(self, tail: DeviceTail, params: SamplingParams) -> None:
        self._tail = tail
        self._truncated = params.truncates
        n = tail.max_rows
        numbers = {
            "temperature_ptr": np.full(n, params.temperature, np.float32),
            "top_k_ptr": np.full(n, params.top_k, np.int32),
            "top_p_ptr": np.full(n, params.top_p, np.float32),
            "min_p_ptr": np.full(n, params.min_p, np.float32),
            "lengths_ptr": np.zeros(n, np.int32),
        }
        self._addresses = tail.request_addresses
        for name, array in numbers.items():
            tail.stream.upload(self._addresses[name], array)

    def verify(self, logits: DeviceLogits, drafts: Sequence[int], draws: NDArray[np.float64]) -> Verdict:
        """See `dsc.runtime.decode.Verifier`.

        Raises:
            GenerationError: a row allows no token.
        """
        tail = self._tail
        rule = tail.sampled_rule(len(drafts) + 1, self._truncated)
        tail.stream.upload(self._addresses["uniforms_ptr"], draws.astype(np.float32))
        tail.launch(rule, logits, self._addresses)
        tail.read()
        drawn = tail.next_tokens[: len(drafts) + 1].tolist()
        accepted = next((i for i, draft in enumerate(drafts) if draft != drawn[i]), len(drafts))
        tail.require_finite(rule, accepted + 1)
        return Verdict(accepted, drawn[accepted])
