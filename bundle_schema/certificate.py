"""`certificate.json`: what the gate measured when the bundle was compiled."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from dsc.bundle_schema.strict_json import dump_canonical, parse_strict
from dsc.bundle_schema.tensors import StrictModel

CERTIFICATE_NAME: Final = "certificate.json"
CERTIFICATE_SCHEMA: Final = "1.0"

Name = Annotated[str, Field(min_length=1, max_length=1024)]
Text = Annotated[str, Field(max_length=65536)]
Number = Annotated[int, Field(ge=0, le=2**50)]
Difference = Annotated[float, Field(ge=0.0)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class Mismatch(StrictModel):
    """Where a speculative greedy run left the plain one.

    Attributes:
        prompt: index of the calibration prompt.
        position: index of the first differing generated token.
        plain, speculative: the token ids there.
        logit_gap: plain run's logit of its token minus its logit of the other; 0 is a tie.
    """

    prompt: Number
    position: Number
    plain: Number
    speculative: Number
    logit_gap: Difference


class GreedyCheck(StrictModel):
    """Greedy speculative decoding against greedy plain decoding, token for token.

    Attributes:
        n_judged: drafts up to and including the first wrong one of each block; `n_held` of them were right.
    """

    proposer: Name
    window: Annotated[int, Field(ge=1, le=16)]
    n_prompts: Number
    n_tokens: Number
    n_judged: Number = 0
    n_held: Number = 0
    mismatches: tuple[Mismatch, ...] = ()


class RowsCheck(StrictModel):
    """Logits of rows verified together against the same rows one at a time.

    Attributes:
        max_rows: the widest verification that was tried.
        n_rows: rows compared.
        n_argmax_changes: rows whose best token differs.
        n_ties: of those, rows whose two best logits were equal.
    """

    max_rows: Annotated[int, Field(ge=1, le=1024)]
    n_rows: Number
    bit_equal: bool
    max_difference: Difference
    n_argmax_changes: Number = 0
    n_ties: Number = 0

    @model_validator(mode="after")
    def _bit_equal_rows_do_not_differ(self) -> Self:
        if self.bit_equal and (self.max_difference or self.n_argmax_changes):
            raise ValueError("rows that are bit-equal cannot differ")
        return self


class ChiSquareCheck(StrictModel):
    """Sampled speculative output against the plain distribution (Pearson's chi-square)."""

    proposer: Name
    temperature: Annotated[float, Field(gt=0.0, le=100.0)]
    top_p: Probability = 1.0
    n_draws: Number
    statistic: Difference
    degrees_of_freedom: Number
    p_value: Probability


class TokenizerCheck(StrictModel):
    """How the draft's token ids relate to the target's; `first_difference` is for people."""

    verdict: Name
    n_target: Number
    n_draft: Number
    n_mapped: Number = 0
    first_difference: Text = ""


class FiniteCheck(StrictModel):
    """NaN and infinities among the logits of the calibration prompts."""

    n_values: Number
    n_not_finite: Number


class ParityCheck(StrictModel):
    """The compiled target against the framework that the checkpoint was made for.

    Attributes:
        framework: name and version.
        max_difference: largest absolute difference of a logit.
        logit_range: largest minus smallest reference logit.
        n_argmax_equal: positions with the same best token.
        correlation: of all logits, each position's mean taken off; rounded weights lower it a little, wrong ones to
            nothing. None: not measured.
    """

    framework: Name
    n_positions: Number
    max_difference: Difference
    logit_range: Difference
    n_argmax_equal: Number
    correlation: Annotated[float, Field(ge=-1, le=1)] | None = None


class Certificate(StrictModel):
    """Measured results and the verdict drawn from them.

    Attributes:
        verdict: ``pass``; ``fail``, which a strict compile does not emit; ``not_strict`` when something
            differs and the caller asked for the bundle all the same.
        reasons: one line for everything that stands against ``pass``.
        kernels: who ran the quantised products, onnxruntime's own operators or the native library.
        device: fingerprint of the machine that measured.
    """

    schema_version: Annotated[str, Field(pattern=r"^\d+\.\d+$")] = CERTIFICATE_SCHEMA
    verdict: Literal["pass", "fail", "not_strict"]
    reasons: tuple[Text, ...] = ()
    kernels: Literal["ort", "native"] = "ort"
    device: Name
    greedy: tuple[GreedyCheck, ...] = ()
    rows: RowsCheck | None = None
    sampling: tuple[ChiSquareCheck, ...] = ()
    tokenizer: TokenizerCheck | None = None
    finite: FiniteCheck | None = None
    parity: ParityCheck | None = None

    @model_validator(mode="after")
    def _verdict_agrees_with_reasons(self) -> Self:
        if (self.verdict == "pass") == bool(self.reasons):
            raise ValueError("a verdict other than 'pass' has reasons, 'pass' has none")
        return self


def parse_certificate(data: bytes, where: str = CERTIFICATE_NAME) -> Certificate:
    """Read a certificate.

    Raises:
        BundleError: of the kind that says what is wrong.
    """
    return parse_strict(Certificate, data, where, CERTIFICATE_SCHEMA)


def dump_certificate(certificate: Certificate) -> bytes:
    """The canonical bytes of a certificate."""
    return dump_canonical(certificate)
