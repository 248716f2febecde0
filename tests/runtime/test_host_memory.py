from pathlib import Path

import pytest

from dsc.runtime.host_memory import memory_limit, memory_share

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\nHugePages_Total:       0\n"


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_machine_alone(tmp_path):
    root = system(tmp_path, {"proc/meminfo": MEMINFO})
    assert memory_limit(root) == 1000 * 1024
    assert memory_share(root) == 0.6


@pytest.mark.parametrize(
    ("folder", "limit", "used", "cache"),
    [
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_container_counts_when_it_is_smaller_and_its_page_cache_does_not(tmp_path, folder, limit, used, cache):
    files = {"proc/meminfo": MEMINFO, f"{folder}/memory.stat": f"anon 7\n{cache} 50000\n"}
    root = system(tmp_path, files | {f"{folder}/{limit}": "100000\n", f"{folder}/{used}": "140000\n"})
    assert memory_limit(root) == 100000
    assert memory_share(root) == 0.9


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", "not a number"])
def test_a_container_without_a_limit_does_not_count(tmp_path, limit):
    files = {"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": limit, "sys/fs/cgroup/memory.current": "5"}
    assert memory_limit(system(tmp_path, files)) == 1000 * 1024


def test_a_system_that_says_nothing_is_not_known(tmp_path):
    assert (memory_limit(tmp_path), memory_share(tmp_path)) == (None, None)
