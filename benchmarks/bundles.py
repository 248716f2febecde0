"""The benchmark's bundles: one model at every precision, compiled by `dsc compile` unless they are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MAX_LENGTH = 2048
OPTIONS = {
    "fp32": ("--precision", "fp32"),
    "fp32-self": ("--precision", "fp32", "--draft", "self", "--draft-precision", "keep"),
    "int8": ("--precision", "int8"),
    "int4": ("--precision", "int4"),
    "keep": ("--precision", "keep"),
}


def make_bundles(
    target: Path, folder: Path, names: tuple[str, ...] = tuple(OPTIONS), draft: Path | None = None, again: bool = False
) -> dict[str, Path]:
    """Compile what is not there.

    Args:
        draft: a draft model's checkpoint; adds a bundle `fp32-model`, with the draft in four bits.
        again: compile all of them, as after a change of the compiler or of what the machine is busy with: the
            costs by which windows are chosen are measured in the compile.

    Returns:
        Name -> bundle.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {name: OPTIONS[name] for name in names}
    if draft is not None:
        wanted["fp32-model"] = ("--precision", "fp32", "--draft", str(draft), "--draft-precision", "int4")
    made = {}
    for name, options in wanted.items():
        made[name] = path = folder / f"{name}.dsmodel"
        if path.exists() and not again:
            continue
        print(f"compiling {path}", flush=True)
        dsc = Path(sys.executable).parent / "dsc"
        # A failed certificate is a finding of the benchmark, not a reason to do without the figures.
        common = ("--max-length", str(MAX_LENGTH), "--no-strict", "--force")
        command = [str(dsc), "compile", str(target), "-o", str(path), *options, *common]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return made
