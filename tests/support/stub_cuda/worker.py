"""Runs in a process whose onnxruntime is the GPU build and whose CUDA is the stub: loads a bundle and generates.

Usage: ``worker.py BUNDLE CAPABILITY KERNELS`` with a list of calls as JSON on standard input: keyword arguments of
`generate`. KERNELS is the argument of `load`, or ``none``: as if the library had not been built. Writes a list of
results: ids, statistics and events of each call; the first is of loading. Logits are those of
`scripted_lm.reference_logits` over `table`.
"""

from __future__ import annotations

import importlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from device import Device  # noqa: E402

from dsc.bundle_schema.errors import DscError  # noqa: E402
from dsc.kernels.native import NativeLibrary  # noqa: E402
from dsc.runtime.cuda_placer import host_operators  # noqa: E402

loading: Any = importlib.import_module("dsc.runtime.load")  # the package's `load` is the function


@cache
def table(name: str, vocab: int) -> np.ndarray:
    """The scripted rule of the target; the draft's is close to it."""
    rule = np.random.default_rng(4).normal(size=(37, vocab)).astype(np.float32)
    if name == "target":
        return rule
    return rule + np.random.default_rng(5).normal(scale=0.3, size=rule.shape).astype(np.float32)


def main(path: str, capability: str, kernels: Any, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    major, minor = map(int, capability.split("."))
    if kernels == "none":
        kernels = "auto"
        loading.find_cuda_op = lambda: NativeLibrary(None, "not built")
    device = Device(table, (major, minor))
    try:
        model = loading.load(path, provider="cuda", kernels=kernels)
    except DscError as error:
        return [{"error": f"{type(error).__name__}: {error}"}]
    target = model.bundle.target
    results: list[dict[str, Any]] = [
        {
            "events": device.events(),
            "on_host": host_operators(target.session._session),
            "pools": {name: f"{pool.address:x}" for name, pool in target.zone.device_pools.items()},
            "stream": f"{target.session.stream.handle:x}",
            "kernels": model.bundle.tail._kernels.choice.refused,
        }
    ]
    for call in calls:
        if call.pop("ban", False):
            call["processors"] = [ban]
        with ThreadPoolExecutor(1) as thread:  # never the one that loaded
            result = thread.submit(model.generate, **call).result()
        results.append({"ids": result.ids, "stats": result.stats.to_dict(), "events": device.events()})
    model.bundle.arena.check_guards()
    return results


def ban(logits: np.ndarray, tokens: Any, drafts: Any) -> None:
    """A processor: even tokens are out."""
    logits[:, ::2] = -np.inf


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:], json.load(sys.stdin)), default=int))
