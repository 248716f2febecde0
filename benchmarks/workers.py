"""The benchmark's side of a runtime's process: start it, ask, close it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

SCRIPT = Path(__file__).parent / "peer_worker.py"
SECONDS_A_REQUEST = 600.0


class WorkerError(RuntimeError):
    """A runtime's process ended or hung; the message is the end of what it wrote to stderr."""


class Worker:
    """One runtime's process; made by `worker`."""

    def __init__(self, process: subprocess.Popen[str], errors: Any) -> None:
        self._process = process
        self._errors = errors
        self.loaded = self._read()

    def generate(
        self, ids: Sequence[int], n_tokens: int, speculation: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Ask for tokens.

        Raises:
            WorkerError: the process ended, or took too long and was ended.
        """
        assert self._process.stdin is not None
        request = {"ids": list(ids), "n_tokens": n_tokens, "speculation": speculation}
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._last_error()) from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        watchdog = Timer(SECONDS_A_REQUEST, self._process.kill)
        watchdog.start()
        line = self._process.stdout.readline()
        watchdog.cancel()
        if not line:
            self._process.wait()
            raise WorkerError(self._last_error())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"its process ended with status {self._process.returncode}"


@contextmanager
def worker(python: Path, peer: str, options: Mapping[str, Any]) -> Iterator[Worker]:
    """A runtime's process with its model loaded; ended on leaving.

    Raises:
        WorkerError: it could not be started or could not load the model.
    """
    if not python.exists():
        raise WorkerError(f"there is no {python}")
    threads = str(options["threads"])
    # Every runtime is told by its own option; these reach the thread pools that have none.
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [str(python), str(SCRIPT), peer, json.dumps(dict(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        with process:  # waits, and closes the pipes
            try:
                yield Worker(process, errors)
            finally:
                assert process.stdin is not None
                process.terminate()
