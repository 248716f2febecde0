"""`dsc passes`: what each graph pass is called, takes and does."""

from __future__ import annotations

import inspect
from dataclasses import fields

from dsc.passes import ALL_PASSES
from dsc.passes.base import PROGRAM_ONLY
from dsc.passes.pipeline import load_pass


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
