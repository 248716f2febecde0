"""dsc: a bundle by its runtime. Also books the time inside onnxruntime, so that the rest is dsc's own."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import onnxruntime

from dsc.bundle_schema.container import open_bundle
from dsc.runtime import load as load_bundle

VERSION = f"dsc {version('dsc-toolchain')}, onnxruntime {onnxruntime.__version__}"


class RunClock:
    """Calls of, and seconds inside, every session's `run` methods."""

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        for name in ("run", "run_with_iobinding"):
            setattr(onnxruntime.InferenceSession, name, self._timed(getattr(onnxruntime.InferenceSession, name)))

    def _timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = run(*args, **kwargs)
            self.seconds += perf_counter() - start
            self.calls += 1
            return result

        return timed


def target_nbytes(path: Path) -> int:
    """Of the weights that a plain step reads."""
    with open_bundle(path) as bundle:
        return sum(weight.nbytes for weight in bundle.weights() if any(u.startswith("target/") for u in weight.users))


class Runtime:
    def __init__(self, options: dict[str, Any]) -> None:
        self._clock = RunClock()
        self._path = Path(options["model"])
        self._model = load_bundle(self._path, threads=options["threads"])

    @property
    def facts(self) -> dict[str, Any]:
        """Read when the load has been timed: the index of the weights is no part of it."""
        bundle = self._model.bundle
        return {
            "kernels": bundle.settings.kernels,
            "arena_bytes": bundle.arena.nbytes,
            "weight_bytes": self._path.stat().st_size,
            "target_bytes": target_nbytes(self._path),
            "proposers": self._model.proposers,
        }

    def generate(self, ids: list[int], n_tokens: int, speculation: dict[str, Any] | None) -> dict[str, Any]:
        clock = self._clock
        start = perf_counter()
        stream = self._model.stream(
            ids, max_new_tokens=n_tokens, speculation="off" if speculation is None else speculation
        )
        next(stream)
        first, calls, seconds = perf_counter(), clock.calls, clock.seconds
        result = stream.finish()
        end = perf_counter()
        return {
            "ids": list(result.ids),
            "first_s": first - start,
            "total_s": end - start,
            "steps": clock.calls - calls,
            "ort_s": clock.seconds - seconds,
            "stats": result.stats.to_dict(),
        }


def load(options: dict[str, Any]) -> Runtime:
    return Runtime(options)
