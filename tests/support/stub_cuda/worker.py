"""Runs in a process whose onnxruntime is the GPU build and whose CUDA is the stub: loads a bundle and generates.

Usage: ``worker.py BUNDLE CAPABILITY`` with a list of calls as JSON on standard input: keyword arguments of `generate`.
Writes a list of results: ids, statistics and events of each call; the first is of loading. Logits are those of
`scripted_lm.reference_logits` over TABLE and DRAFT_TABLE.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from device import Device  # noqa: E402

from dsc.bundle_schema.errors import DscError  # noqa: E402
from dsc.runtime import load  # noqa: E402
from dsc.runtime.cuda_placer import host_operators  # noqa: E402

VOCAB = 80
TABLE = np.random.default_rng(4).normal(size=(37, VOCAB)).astype(np.float32)
DRAFT_TABLE = TABLE + np.random.default_rng(5).normal(scale=0.3, size=TABLE.shape).astype(np.float32)


def main(path: str, capability: str, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    major, minor = map(int, capability.split("."))
    device = Device({"target": TABLE, "draft": DRAFT_TABLE}, (major, minor))
    try:
        model = load(path, provider="cuda")
    except DscError as error:
        return [{"error": f"{type(error).__name__}: {error}"}]
    target = model.bundle.target
    results: list[dict[str, Any]] = [
        {
            "events": device.events(),
            "on_host": host_operators(target.session._session),
            "stream": f"{target.session.stream.handle:x}",
            "kernels": model.bundle.tail._kernels.choice.refused,
        }
    ]
    for call in calls:
        if call.pop("ban", False):
            call["processors"] = [ban]
        try:
            result = model.generate(**call)
        except DscError as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
            continue
        results.append({"ids": result.ids, "stats": result.stats.to_dict(), "events": device.events()})
    model.bundle.arena.check_guards()
    return results


def ban(logits: np.ndarray, tokens: Any, drafts: Any) -> None:
    """A processor: even tokens are out."""
    logits[:, ::2] = -np.inf


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:], json.load(sys.stdin)), default=int))
