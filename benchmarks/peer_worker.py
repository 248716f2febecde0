"""One runtime in a process of its own: loads a model, then answers requests, JSON lines on standard input and output.

    python benchmarks/peer_worker.py dsc '{"model": "int4.dsmodel", "threads": 2}'

The module `peer_<name>` beside this file has a function `load(options)`, whose result has `generate(ids, n_tokens,
speculation)`: it decodes greedily up to the end token, at most `n_tokens`, and returns `ids`, `first_s` (seconds from
the call to the first token), `total_s`, and what else that runtime can tell. Runs in the peers' environment too: no
imports but the standard library's.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any


def busy_seconds() -> float:
    """CPU seconds that the whole machine has spent working, on all cores; 0 where the system does not tell."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class LoadMeter:
    """How much of the machine other processes used between its making and `share`."""

    def __init__(self) -> None:
        self._start = (perf_counter(), busy_seconds(), own_seconds())

    def share(self) -> float:
        started, busy, own = self._start
        foreign = (busy_seconds() - busy) - (own_seconds() - own)
        return max(0.0, foreign / ((perf_counter() - started) * (os.cpu_count() or 1)))


def peak_megabytes() -> float:
    """Largest resident size so far; rusage's figure would include what the parent had before exec."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def main() -> None:
    sys.path.append(str(Path(__file__).parent))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers

    def answer(**record: Any) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    meter, started = LoadMeter(), perf_counter()
    peer = import_module(f"peer_{sys.argv[1]}")
    imported = perf_counter()
    runtime = peer.load(json.loads(sys.argv[2]))
    answer(
        import_s=imported - started,
        load_s=perf_counter() - imported,
        foreign=meter.share(),
        version=peer.VERSION,
        facts=getattr(runtime, "facts", {}),
    )
    for line in sys.stdin:
        meter = LoadMeter()
        result = runtime.generate(**json.loads(line))
        answer(**result, foreign=meter.share(), peak_mb=peak_megabytes())


if __name__ == "__main__":
    main()
