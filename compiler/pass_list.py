"""`dsc passes`: what each graph pass is called, takes and does, and which run in which order."""

from __future__ import annotations

import inspect
from dataclasses import fields

from dsc.passes import ALL_PASSES
from dsc.passes.base import PROGRAM_ONLY
from dsc.passes.pass_order import Kernels, Precision, default_pipeline
from dsc.passes.pipeline import load_pass

_PIPELINES: tuple[tuple[Kernels, Precision], ...] = (
    ("ort", "fp32"),
    ("ort", "int4"),
    ("native", "fp32"),
    ("native", "int4"),
    ("cuda", "fp16"),
    ("cuda_native", "fp16"),
)


def describe_passes() -> list[dict[str, str]]:
    """One row a pass: its name, its options with their defaults, the first sentence of its docstring."""
    rows = []
    for name in ALL_PASSES:
        cls = load_pass(name)
        options = [
            f"{field.name}={field.default}"
            for field in fields(cls)
            if field.metadata != PROGRAM_ONLY and isinstance(field.default, int | float | str | bool | tuple)
        ]
        summary = (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
        rows.append({"name": name, "options": ", ".join(options), "summary": summary})
    return rows


def describe_pipelines() -> list[dict[str, str]]:
    """The passes that run when a compile names none, in order, by kernels and precision, as `--passes` takes them."""
    return [
        {
            "kernels": kernels,
            "precision": precision,
            "passes": ",".join(str(item) for item in default_pipeline(kernels, precision)),
        }
        for kernels, precision in _PIPELINES
    ]
