"""The gate: run the bundle that was just written and measure whether it may be sealed.

Greedy speculative output must equal greedy plain output, token for token; rows verified together must agree
with rows run alone; sampled output must have the target's distribution; logits must be finite and agree with
the framework the checkpoint was made for. The result is the certificate, and the cost curve of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsc.bundle_schema.certificate import (
    Certificate,
    ChiSquareCheck,
    FiniteCheck,
    GreedyCheck,
    ParityCheck,
    TokenizerCheck,
)
from dsc.bundle_schema.dflash_config import MAX_WINDOW, CostCurve
from dsc.compiler.calibration import calibration_ids
from dsc.compiler.gate_checks import Reference, check_greedy, check_parity, check_rows, check_sampling
from dsc.compiler.gate_costs import measure_costs
from dsc.compiler.request import GateOptions
from dsc.runtime.costs import device_fingerprint
from dsc.runtime.load import load

SMALLEST_P_VALUE = 1e-4
LARGEST_DIFFERENCE = 1e-3  # from the framework's logits, of their range, where the weights are the checkpoint's own
SMALLEST_CORRELATION = 0.9  # with them, where weights are rounded: 0.997 and more were measured, 0 is another model


@dataclass(frozen=True)
class GateResult:
    """What the gate found: the certificate and what rounds cost on this machine."""

    certificate: Certificate
    costs: tuple[CostCurve, ...]


def run_gate(
    bundle: Path,
    options: GateOptions,
    window: int,
    reference: Reference | None,
    tokenizer: TokenizerCheck | None,
    exact_weights: bool,
    threads: int | None,
) -> GateResult:
    """Measure the bundle at `bundle`.

    Args:
        window: the window that the bundle will use by default.
        reference: the framework's logits, when the model was at hand.
        exact_weights: the graph holds the reference's own weights, so that it must agree with it to the last digits;
            otherwise it must only be the same model.
        threads: as for `load`.
    """
    model = load(bundle, threads=threads, verify="never")
    info = model.bundle.manifest.target.info
    prompts = calibration_ids(model.bundle.codec, info.vocab_size, options.n_prompts)
    room = model.max_length - options.n_tokens - MAX_WINDOW
    prompts = [ids[: max(1, room)] for ids in prompts]
    rows, finite = check_rows(model, prompts)
    sound = finite.n_not_finite == 0  # otherwise there is nothing to choose tokens from, and nothing to compare
    greedy = check_greedy(model, prompts, options.n_tokens, window) if sound else []
    sampling = check_sampling(model, prompts, options.n_draws) if sound else []
    parity = check_parity(model, reference) if sound and reference is not None else None
    costs = measure_costs(model, prompts)
    model.reset()
    reasons = _reasons(greedy, sampling, finite) + _against_parity(parity, exact_weights)
    failed: Literal["fail", "not_strict"] = "fail" if options.strict else "not_strict"
    certificate = Certificate(
        verdict=failed if reasons else "pass",
        reasons=tuple(reasons),
        kernels="native" if model.bundle.settings.library else "ort",
        device=device_fingerprint(model.bundle.settings),
        greedy=tuple(greedy),
        rows=rows,
        sampling=tuple(sampling),
        tokenizer=tokenizer,
        finite=finite,
        parity=parity,
    )
    return GateResult(certificate, costs)


def _reasons(
    greedy: Sequence[GreedyCheck],
    sampling: Sequence[ChiSquareCheck],
    finite: FiniteCheck,
) -> list[str]:
    """Everything that stands against a pass, one line each."""
    reasons = [
        f"greedy output with {check.proposer}, window {check.window}, differs in {len(check.mismatches)} "
        f"of {check.n_prompts} sequences"
        for check in greedy
        if check.mismatches
    ]
    reasons += [
        f"sampled output with {check.proposer} at temperature {check.temperature}: p = {check.p_value:.2g}"
        for check in sampling
        if check.p_value < SMALLEST_P_VALUE
    ]
    if finite.n_not_finite:
        reasons.append(f"{finite.n_not_finite} logits are not finite")
    return reasons


def _against_parity(parity: ParityCheck | None, exact_weights: bool) -> list[str]:
    """What the framework's logits say against a pass."""
    if parity is None:
        return []
    if exact_weights and parity.max_difference > LARGEST_DIFFERENCE * parity.logit_range:
        found, whole = f"{parity.max_difference:.3g}", f"{parity.logit_range:.3g}"
        return [f"logits differ from {parity.framework} by {found}, range {whole}"]
    if parity.correlation is not None and parity.correlation < SMALLEST_CORRELATION:
        return [f"logits correlate with those of {parity.framework} by {parity.correlation:.3f} only"]
    return []
