"""Mutate the headers and the manifest of a small bundle and open the result, over and over.

Run as a script, it limits its own address space to 64 MiB more than it has, so that a large allocation is
a `MemoryError`, and prints how often each outcome occurred: ``fuzz_headers.py FILE COUNT SEED``.
"""

from __future__ import annotations

import json
import os
import random
import resource
import struct
import sys
from collections import Counter
from pathlib import Path

from bundle_forge import manifest_tree, to_json
from bundle_samples import write_sample

from dsc.bundle_schema.container import open_bundle
from dsc.bundle_schema.errors import DscError
from dsc.bundle_schema.manifest import parse_manifest

ALLOWANCE = 64 * 2**20
NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**40, 2**63 - 1, 2**64 - 1)
WORDS = (b"NaN", b"-1", b"1e18", b"1e999", b"null", b"[", b"{", b'"', b"\\ud800", b"\xff", b"..", b"/", b"PK\x05\x06")


def header_positions(path: Path) -> list[int]:
    """Every byte that is not zero and not payload: headers, directory, end record, manifest."""
    with open_bundle(path) as bundle:
        headers = set(range(len(bundle.map)))
        for member in bundle.members.values():
            headers -= set(range(member.offset, member.offset + member.nbytes))
        return sorted(position for position in headers if bundle.map[position])


def mutate(data: bytearray, positions: list[int], rng: random.Random) -> bytearray:
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        position = min(rng.choice(positions), len(data) - 1)
        kind = rng.randrange(6)
        if kind == 0:
            data[position] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[position] = rng.randrange(256)
        elif kind == 2:
            size, form = rng.choice(((2, "<H"), (4, "<L"), (8, "<Q")))
            number = rng.choice(NUMBERS) % 2 ** (8 * size)
            data[position : position + size] = struct.pack(form, number)
        elif kind == 3:
            word = rng.choice(WORDS)
            data[position : position + len(word)] = word
        elif kind == 4:
            other = rng.choice(positions)
            data[position : position + 30] = data[other : other + 30]
        else:
            del data[position : position + rng.randrange(1, 64)]
    return data


def fuzz(path: Path, count: int, seed: int) -> Counter[str]:
    """Open `count` mutants; a changed one must be a `DscError`, and any other exception is let through."""
    write_sample(path)
    original = path.read_bytes()
    positions = header_positions(path)
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    with path.open("r+b", buffering=0) as file:
        for _ in range(count):
            mutant = mutate(bytearray(original), positions, rng)
            os.pwrite(file.fileno(), mutant, 0)
            os.ftruncate(file.fileno(), len(mutant))
            try:
                with open_bundle(path) as bundle:
                    bundle.verify()
                assert mutant == original, "a changed file passed every check"
                outcomes["unchanged"] += 1
            except DscError as error:
                outcomes[type(error).__name__] += 1
    return outcomes


def fuzz_manifest(count: int, seed: int) -> Counter[str]:
    """Parse `count` mutants of a manifest, which in a file the checksum would keep from the parser."""
    original = to_json(manifest_tree([]))
    positions = list(range(len(original)))
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        try:
            parse_manifest(bytes(mutate(bytearray(original), positions, rng)))
            outcomes["parsed"] += 1
        except DscError as error:
            outcomes[type(error).__name__] += 1
    return outcomes


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ALLOWANCE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    path, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    write_sample(path)
    open_bundle(path).close()
    limit_memory()
    print(json.dumps({"files": fuzz(path, count // 2, seed), "manifests": fuzz_manifest(count // 2, seed)}))


if __name__ == "__main__":
    main()
