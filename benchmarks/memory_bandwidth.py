"""How fast this machine reads memory: the best of several passes over an array far larger than its caches.

python benchmarks/memory_bandwidth.py --threads 2
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when numpy is imported: the threads here are our own

import numpy as np

PASSES = 12


def read_bandwidth(threads: int, n_bytes: int) -> float:
    """Bytes a second that `threads` threads read together; a dot product reads and does little else. That of two arrays
    reads two places at once, which memory delivers faster than one.
    """
    parts = np.ones((threads, 2, n_bytes // 8 // threads), np.float32)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(PASSES):
            start = perf_counter()
            list(pool.map(lambda part: float(np.dot(*part)), parts))
            best = max(best, parts.nbytes / (perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--megabytes", type=int, default=512, help="size of the array")
    given = parser.parse_args()
    print(f"{read_bandwidth(given.threads, given.megabytes << 20):.0f}")


if __name__ == "__main__":
    main()
