"""Compile a model and be killed when a stage begins: ``compile_and_die.py SOURCE OUTPUT STAGE``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from dsc.compiler.compile import compile_bundle
from dsc.compiler.request import build_request


def die_at(stage: str) -> None:
    def on_stage(name: str, index: int, total: int) -> None:
        if name == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    source, output = map(Path, sys.argv[1:3])
    compile_bundle(build_request({"target": source, "output": output, "force": True}), on_stage)


if __name__ == "__main__":
    die_at(sys.argv[3])
