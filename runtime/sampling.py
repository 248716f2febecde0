"""How the next token is chosen from a row of logits, and where its randomness comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dsc.bundle_schema.errors import RequestError
from dsc.runtime.arguments import number

_DRAWS_PER_BLOCK = 256
_COLDEST = 1e-5  # below, the division would leave float32's range; the most likely token is what is left


class SamplingParams(BaseModel):
    """What a request asks of the choice of tokens; the defaults are greedy decoding.

    Attributes:
        temperature: 0 takes the most likely token, and so does anything below 1e-5; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one; 0 keeps all.
        repetition_penalty: logits of tokens seen in prompt or output are divided (positive) or multiplied (negative) by
            it (Keskar et al. 2019, CTRL).
        presence_penalty: subtracted once from logits of tokens in the output.
        frequency_penalty: subtracted from them for each time they occurred.
        logit_bias: added to the logits of single tokens.
        seed: same seed, same output; None draws a new one, which the statistics report.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(default=0.0, ge=0, le=100)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, lt=1)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    presence_penalty: float = Field(default=0.0, ge=-100, le=100)
    frequency_penalty: float = Field(default=0.0, ge=-100, le=100)
    logit_bias: Mapping[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-1e30, le=1e30)]] = Field(
        default_factory=dict
    )
    seed: int | None = Field(default=None, ge=0, lt=2**64)

    _numbers = field_validator("*", mode="before")(number)

    @property
    def greedy(self) -> bool:
        """No randomness: the most likely token after penalties."""
        return self.temperature < _COLDEST

    @property
    def truncates(self) -> bool:
        """Some tokens are left out, whatever the logits."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def edits_logits(self) -> bool:
        """Penalties or biases change the logits before the choice."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.logit_bias)


def sampling_params(
    value: SamplingParams | Mapping[str, Any] | None, seed: int | None, vocab_size: int
) -> SamplingParams:
    """The parameters of a request from what its caller gave.

    Raises:
        RequestError: an unknown or out-of-range field, named, or a bias of a token that the vocabulary has not.
    """
    if not (value is None or isinstance(value, SamplingParams | Mapping)):
        raise RequestError("sampling", f"SamplingParams or a mapping of their fields is required, got {value!r}")
    try:
        params = value if isinstance(value, SamplingParams) else SamplingParams.model_validate(value or {})
        params = params if seed is None else SamplingParams(**{**params.model_dump(), "seed": seed})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        what = f"{first['msg'].removeprefix('Value error, ')}, got {first['input']!r}"
        raise RequestError(f"sampling.{field}", what) from error
    for token in params.logit_bias:
        if token >= vocab_size:
            raise RequestError("sampling.logit_bias", f"token ids below {vocab_size} are required, got {token}")
    return params


class UniformDraws:
    """Uniform draws in [0, 1) addressed by position in the sequence.

    The draws come from a counter-based generator (Philox, Salmon et al. 2011) keyed by the seed, so they do not depend
    on
    how the output was cut into rounds: an interrupted, rewound or differently speculated run draws the same number at
    the same place.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._block_number = -1
        self._block: NDArray[np.float64] = np.empty(0)

    def at(self, position: int, count: int) -> NDArray[np.float64]:
        """Draws [count] of positions `position` .. `position + count - 1`."""
        number, index = divmod(position, _DRAWS_PER_BLOCK)
        if number != self._block_number:
            bits = np.random.Philox(key=self.seed, counter=[0, 0, 0, number])
            self._block = np.random.Generator(bits).random(_DRAWS_PER_BLOCK)
            self._block_number = number
        draws = self._block[index : index + count]
        if len(draws) < count:
            draws = np.concatenate((draws, self.at(position + len(draws), count - len(draws))))
        return draws


class LogitsEditor:
    """Applies penalties and biases to rows of logits, each with the exact history that plain decoding would
    have.

    Args:
        params: the request's parameters.
        vocab_size: width of a row.
        n_prompt: tokens of the sequence that are its prompt.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, n_prompt: int) -> None:
        self._params = params
        self._n_prompt = n_prompt
        self._seen = np.zeros(vocab_size, bool)  # in prompt or output
        self._counts = np.zeros(vocab_size, np.int32)  # in the output
        self._known = 0
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self._bias = np.fromiter(params.logit_bias.values(), np.float32)

    def __call__(self, logits: NDArray[np.float32], tokens: Sequence[int], drafts: Sequence[int]) -> None:
        """Change `logits` [K + 1, V] in place; row i follows `tokens` and the first i of `drafts`."""
        self._learn(tokens)
        seen, counts = self._seen, self._counts
        for i, row in enumerate(logits):
            if i == 1:
                seen, counts = seen.copy(), counts.copy()
            if i > 0:
                seen[drafts[i - 1]] = True
                counts[drafts[i - 1]] += 1
            self._edit_row(row, np.flatnonzero(seen), np.flatnonzero(counts), counts)

    def _learn(self, tokens: Sequence[int]) -> None:
        if len(tokens) < self._known:
            self._seen[:], self._counts[:], self._known = False, 0, 0
        new = np.asarray(tokens[self._known :], np.int64)
        self._seen[new] = True
        np.add.at(self._counts, new[max(self._n_prompt - self._known, 0) :], 1)
        self._known = len(tokens)

    def _edit_row(
        self,
        row: NDArray[np.float32],
        seen: NDArray[np.intp],
        used: NDArray[np.intp],
        counts: NDArray[np.int32],
    ) -> None:
        params = self._params
        if params.repetition_penalty != 1:
            x = row[seen]
            row[seen] = np.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            # In float32 throughout: to the bit what the tail graphs compute.
            presence, frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
            row[used] -= presence + frequency * counts[used].astype(np.float32)
        if self._bias_ids.size:
            row[self._bias_ids] += self._bias
