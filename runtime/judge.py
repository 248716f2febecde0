"""Who judges the target's logits in a request, and where: decided once, before its first round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dsc.runtime.cached_model import CachedModel
from dsc.runtime.decode import LogitsHook, Verifier
from dsc.runtime.device_verify import DeviceGreedyVerifier, DeviceSampledVerifier, DeviceTail
from dsc.runtime.sampling import SamplingParams
from dsc.runtime.verify import verifier_for

if TYPE_CHECKING:
    from dsc.runtime.generate import LoadedBundle


@dataclass(frozen=True)
class Judge:
    """The target as its verifier reads it, and which kernels run the project's own operators.

    Attributes:
        kernels: as in `GenerationStats`; `reason` says why not others.
    """

    target: CachedModel
    verifier: Verifier
    kernels: str
    reason: str


def judge_for(bundle: LoadedBundle, sampling: SamplingParams, hooks: Sequence[LogitsHook]) -> Judge:
    """On a device the bundle's kernels judge, unless something needs the logits on the host: then it says so."""
    target, tail = bundle.target, bundle.tail
    if tail is None:
        return Judge(target, verifier_for(sampling), bundle.settings.kernels, bundle.settings.native.reason)
    native = bundle.settings.native
    notes = [f"attention is onnxruntime's: {native.reason}"] if native.reason else []
    reason = "logits processors, penalties and biases run on the host" if hooks else _refusal(tail, sampling)
    if reason:
        on_host = CachedModel(HostLogits(target.session), target.zone, target.max_length)
        return Judge(
            on_host, verifier_for(sampling), "ort", "; ".join([f"the verdict is the host's: {reason}", *notes])
        )
    verifier = DeviceGreedyVerifier(tail) if sampling.greedy else DeviceSampledVerifier(tail, sampling)
    return Judge(target, verifier, "dspark", "; ".join(notes))


def _refusal(tail: DeviceTail, sampling: SamplingParams) -> str:
    return tail.refusal(tail.greedy_rule(0) if sampling.greedy else tail.sampled_rule(1, sampling.truncates))


class HostLogits:
    """A device's forward whose logits are copied to the host, as an array that may be changed.

    Args:
        session: gives `DeviceLogits`.
    """

    def __init__(self, session: Any) -> None:
        self.chunk: int = session.chunk
        self._session = session

    def forward(self, tokens: Sequence[int], past: int, n_logits: int) -> NDArray[np.float32]:
        """Logits [n_logits, V]; waits for the device."""
        rows: NDArray[np.float32] = self._session.forward(tokens, past, n_logits).host()
        return rows
