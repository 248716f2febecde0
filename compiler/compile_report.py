"""What a compile did: stages, passes, the certificate, the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsc.compiler.console import format_nbytes, print_fields, print_table

if TYPE_CHECKING:
    from dsc.bundle_schema.certificate import Certificate
    from dsc.compiler.gate import GateResult
    from dsc.compiler.request import CompileRequest
    from dsc.compiler.stages import StageReport
    from dsc.passes.pipeline import PipelineReport


@dataclass(frozen=True)
class CompileReport:
    """The result of `compile_bundle`."""

    output: Path
    nbytes: int
    stages: tuple[StageReport, ...]
    passes: dict[str, PipelineReport]
    certificate: Certificate
    verify_ms: tuple[float, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        request: CompileRequest,
        stages: tuple[StageReport, ...],
        passes: dict[str, PipelineReport],
        result: GateResult,
        notes: tuple[str, ...],
    ) -> CompileReport:
        """The report of a finished compile."""
        return cls(
            output=request.output,
            nbytes=request.output.stat().st_size,
            stages=stages,
            passes=passes,
            certificate=result.certificate,
            verify_ms=result.costs[0].verify_ms,
            notes=notes,
        )

    @property
    def seconds(self) -> float:
        """Time of all stages."""
        return sum(stage.seconds for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "output": str(self.output),
            "nbytes": self.nbytes,
            "seconds": self.seconds,
            "stages": [
                {"name": stage.name, "seconds": stage.seconds, "peak_rss_nbytes": stage.peak_rss_nbytes}
                for stage in self.stages
            ],
            "passes": {
                graph: [
                    {
                        "pass": run.spec,
                        "seconds": run.seconds,
                        "fired": run.fired,
                        "skipped": list(map(str, run.skipped)),
                    }
                    for run in report.runs
                ]
                for graph, report in self.passes.items()
            },
            "certificate": self.certificate.model_dump(mode="json"),
            "verify_ms": list(self.verify_ms),
            "notes": list(self.notes),
        }

    def print(self, time_passes: bool, explain: bool) -> None:
        """Tables for people."""
        print_table(
            "stages",
            ("stage", "seconds", "peak memory"),
            [(stage.name, round(stage.seconds, 2), format_nbytes(stage.peak_rss_nbytes)) for stage in self.stages],
        )
        for graph, report in self.passes.items():
            if time_passes:
                rows = [
                    (run.spec, round(run.seconds, 2), round(run.verify_seconds, 2), run.fired) for run in report.runs
                ]
                print_table(f"passes of {graph}", ("pass", "seconds", "verify", "fired"), rows)
            if explain:
                reasons = [(run.spec, str(reason)) for run in report.runs for reason in run.skipped]
                print_table(f"rules of {graph} that did not fire", ("pass", "why"), reasons)
        print_fields(
            str(self.output),
            {
                "size": format_nbytes(self.nbytes),
                "verdict": self.certificate.verdict,
                "reasons": "; ".join(self.certificate.reasons) or "none",
                "seconds": round(self.seconds, 1),
                "notes": "; ".join(self.notes) or "none",
            },
        )
