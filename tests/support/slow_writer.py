"""Write the sample bundle and stop for ever at a given stage, so that a test can kill the process there.

Run as a script: ``slow_writer.py FILE STAGE``; the stage's name is printed when it is reached.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bundle_samples import sample_manifest

from dsc.bundle_schema.container import BundleWriter

STAGES = ("created", "in a member", "between members", "before the manifest", "before the rename")


def pause(stage: str, wanted: str) -> None:
    if stage == wanted:
        print(stage, flush=True)
        time.sleep(600)


def write(path: Path, wanted: str) -> None:
    def payload() -> Iterator[bytes]:
        yield b"x" * 100_000
        pause("in a member", wanted)
        yield b"y" * 100_000

    def sync(descriptor: int) -> None:
        pause("before the rename", wanted)

    os.fsync = sync
    with BundleWriter(path) as writer:
        pause("created", wanted)
        writer.add("target/graph.onnx", payload(), nbytes=200_000)
        pause("between members", wanted)
        writer.add("tokenizer/tokenizer.json", b"{}")
        pause("before the manifest", wanted)
        writer.seal(sample_manifest())


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
