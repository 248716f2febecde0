"""How much memory this process may use, and how much of it is in use: of the machine, or of its container if less."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = "proc/meminfo"
# Limit, use, and the name of the page cache that can be dropped: control groups version 2, then version 1.
_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that this process may use, None when the system does not say."""
    return min((total for total, _ in _accounts(root)), default=None)


def memory_share(root: Path = Path("/")) -> float | None:
    """The share of its memory that is in use, of machine or container, whichever is fuller; None when not known."""
    return max((used / total for total, used in _accounts(root)), default=None)


def _accounts(root: Path) -> list[tuple[int, int]]:
    """(limit, in use) of the machine and of each container that limits."""
    facts = _table(root / _MEMINFO)
    accounts = []
    if facts.get("MemTotal") and "MemAvailable" in facts:
        accounts.append((facts["MemTotal"] * 1024, (facts["MemTotal"] - facts["MemAvailable"]) * 1024))
    for folder, limit_name, used_name, cache_name in _GROUPS:
        limit, used = _number(root / folder / limit_name), _number(root / folder / used_name)
        # A group without a limit says "max", or a number beyond any memory.
        if limit is None or used is None or (accounts and limit >= accounts[0][0]):
            continue
        accounts.append((limit, max(used - _table(root / folder / "memory.stat").get(cache_name, 0), 0)))
    return accounts


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _table(path: Path) -> dict[str, int]:
    """The lines `name[:] number ...` of a file."""
    try:
        rows = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
