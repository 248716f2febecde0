"""The tail of a round: from the target's logits to how many drafts hold and which token comes next.

Greedy: draft i holds if it is the most likely token of its row. Sampled: every row's token is drawn as plain decoding
would draw it, with the draws of its own position, and a draft holds if it is what was drawn. For a proposal that puts
all its weight on one token this accepts exactly as often as rejection sampling (Leviathan et al. 2022: with probability
p(draft)),
and it makes the output a function of the seed alone: the same with speculation, without, and with any proposer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from dsc.bundle_schema.errors import BundleError
from dsc.runtime.decode import Verdict, Verifier
from dsc.runtime.sampling import SamplingParams


class GreedyVerifier:
    """Takes the most likely token of each row; the first of equals, as ONNX's ArgMax does."""

    def verify(self, logits: NDArray[np.float32], drafts: Sequence[int], draws: NDArray[np.float32]) -> Verdict:
        """See `dsc.runtime.decode.Verifier`; draws are not used."""
        return _match(logits.argmax(axis=1), drafts)


def _match(tokens: NDArray[np.integer], drafts: Sequence[int]) -> Verdict:
    """The target's own token of each row against the drafts."""
    accepted = 0
    while accepted < len(drafts) and tokens[accepted] == drafts[accepted]:
        accepted += 1
    return Verdict(accepted, int(tokens[accepted]))


class Verifiers:
    """The bundle's verification tails by graph role."""

    def __init__(self, sessions: Mapping[str, ort.InferenceSession]) -> None:
        self._sessions = dict(sessions)

    def choose(self, sampling: SamplingParams) -> Verifier:
        """The verifier that a request's sampling needs.

        Raises:
            BundleError: the bundle has no tail for sampling.
        """
        if sampling.greedy:
            return GreedyVerifier()
        if "verify_sampled" not in self._sessions:
            raise BundleError("bundle", "a graph with role verify_sampled is required for sampling, got none")
        raise NotImplementedError
