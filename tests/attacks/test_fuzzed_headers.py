"""Fuzzed headers and manifests: every mutant opens or has its error; no crash, no hang, no large allocation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent.parent / "support"


def run_fuzzer(folder: Path, count: int) -> dict[str, dict[str, int]]:
    """The fuzzer in a process of its own, whose address space may grow by 64 MiB."""
    command = [sys.executable, str(SUPPORT / "fuzz_headers.py"), str(folder / "fuzzed"), str(count), "1"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(SUPPORT)})
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def check_outcomes(outcomes: dict[str, dict[str, int]], count: int) -> None:
    assert sum(sum(kind.values()) for kind in outcomes.values()) == count
    assert outcomes["files"].get("unchanged", 0) < 0.01 * count
    assert len(outcomes["files"]) >= 8, "the mutants should reach many of the checks"
    assert len(outcomes["manifests"]) >= 4


def test_ten_thousand_mutants(tmp_path: Path):
    check_outcomes(run_fuzzer(tmp_path, 10_000), 10_000)


@pytest.mark.slow
def test_a_million_mutants(tmp_path: Path):
    check_outcomes(run_fuzzer(tmp_path, 1_000_000), 1_000_000)


HEAD = b'{"schema_version": "1.0", '
UNKNOWN = b", ".join(b'"f%d": 1' % number for number in range(1000))
HOSTILE = {
    "empty lists": HEAD + b'"recipe": {"x": [' + b"[]," * 32_000 + b"[]]}}",
    "empty objects": HEAD + b'"recipe": {"x": [' + b"{}," * 16_000 + b"{}]}}",
    "small objects": HEAD + b'"recipe": {"x": [' + b'{"dsc":1},' * 16_000 + b"{}]}}",
    "strings": HEAD + b'"recipe": {"x": [' + b'"\xc3\xa9\xc3\xa9",' * 65_000 + b'""]}}',
    "big numbers": HEAD + b'"recipe": {"x": [' + b"123456789012345678901234567890," * 65_000 + b"1]}}",
    "one big string": HEAD + b'"name": "' + b"\xf0\x9f\x98\x80" * 1_000_000 + b'"}',
    "unknown fields": HEAD + b",".join(b'"f%d": 1' % number for number in range(60_000)) + b"}",
    "unknown fields in rows": HEAD + b'"members": [' + (b"{" + UNKNOWN + b"},") * 60 + b"1]}",
    "unknown fields in dicts": HEAD + b'"licences": {' + UNKNOWN + b'}, "sources": {' + UNKNOWN + b"}}",
    "wrong rows": HEAD + b'"members": [' + b"1," * 65_000 + b"1]}",
    "wrong numbers": HEAD + b'"weights": [{"shape": [' + b"-1," * 65_000 + b"1]}]}",
    "spaces": HEAD + b" " * 4_000_000 + b'"x": 1}',
    "brackets": b"[" * 65_000,
    "objects in objects": b'{"a":' * 16_000,
}

PARSE = """
import sys
from fuzz_headers import limit_memory
from dsc.bundle_schema.errors import BundleError
from dsc.bundle_schema.manifest import parse_manifest
data = open(sys.argv[1], "rb").read()
limit_memory()
try:
    parse_manifest(data)
except BundleError as error:
    print(type(error).__name__, len(str(error)))
"""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json_needs_little_memory(name: str, tmp_path: Path):
    (tmp_path / "m.json").write_bytes(HOSTILE[name])
    command = [sys.executable, "-c", PARSE, str(tmp_path / "m.json")]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(SUPPORT)})
    assert done.returncode == 0, done.stderr[-2000:]
    kind, length = done.stdout.split()
    assert kind in ("UnsupportedSchema", "InvalidField", "MalformedJson", "OversizedJson")
    assert int(length) < 500


PARSE_INDEX = """
from fuzz_headers import limit_memory
from dsc.bundle_schema.manifest import Member
from dsc.bundle_schema.weight_index import MAX_INDEX_NBYTES, parse_index
row = b"%064x\\tint8\\t0\\t4096\\t" + b"a:b\\t" * 5
data = b"sha256\\tdtype\\tshape\\toffset\\tusers\\n" + b"".join(row % number + b"\\n" for number in range(80_000))
assert 0.9 * MAX_INDEX_NBYTES < len(data) <= MAX_INDEX_NBYTES
region = Member(name="weights/tensors.bin", offset=4096, nbytes=0, sha256="0" * 64)
limit_memory()
print(len(parse_index(memoryview(data), "index", region)))
"""


def test_the_largest_index_of_weights_needs_little_memory():
    command = [sys.executable, "-c", PARSE_INDEX]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(SUPPORT)})
    assert done.stdout.strip() == "80000", done.stderr[-2000:]
