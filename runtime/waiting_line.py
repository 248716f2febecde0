"""Requests that wait for a slot: tenants take turns by their weights, and each tenant's requests keep their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from dsc.bundle_schema.errors import GenerationError
from dsc.runtime.ticket import Ticket

Entry = tuple[Ticket, float | None]
"""A request, and the clock time at which its time is over."""


def _equal(tenant: str) -> float:
    return 1.0


class WaitingLine:
    """First come, first served among tenants who have something waiting, one request of each in turn.

    A tenant of weight w has w turns for each of a tenant of weight 1 (stride scheduling, Waldspurger 1995).

    Args:
        most: requests that may wait.
        weight: of a tenant, above 0.
    """

    def __init__(self, most: int, weight: Callable[[str], float] = _equal) -> None:
        self._most = most
        self._weight = weight
        self._tenants: dict[str, deque[Entry]] = {}
        self._due: dict[str, float] = {}  # when a tenant's next turn is, on a clock that its turns move
        self._now = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def add(self, ticket: Ticket, deadline: float | None) -> None:
        """Wait at the end.

        Raises:
            GenerationError: too many wait.
        """
        if len(self) >= self._most:
            raise GenerationError("engine", f"{self._most} requests wait already", "try again later, or add slots")
        self._tenants.setdefault(ticket.tenant, deque()).append((ticket, deadline))

    def next(self) -> Entry | None:
        """Take the request whose turn it is; its tenant goes to the end."""
        if not self._tenants:
            return None
        tenant = min(self._tenants, key=lambda name: self._due.get(name, self._now))
        self._now = self._due.get(tenant, self._now)
        self._due[tenant] = self._now + 1 / self._weight(tenant)
        self._due = {name: due for name, due in self._due.items() if due > self._now}  # waiting saves no turns up
        own = self._tenants.pop(tenant)
        entry = own.popleft()
        if own:
            self._tenants[tenant] = own
        return entry

    def expire(self, now: float) -> list[Ticket]:
        """Take out those that were cancelled or whose time is over."""
        ended = [entry for entry in self._entries() if _over(entry, now)]
        if ended:
            kept = {name: deque(e for e in own if not _over(e, now)) for name, own in self._tenants.items()}
            self._tenants = {name: own for name, own in kept.items() if own}
        return [ticket for ticket, _ in ended]

    def tickets(self) -> list[Ticket]:
        """All that wait."""
        return [ticket for ticket, _ in self._entries()]

    def clear(self) -> list[Ticket]:
        """Take all out."""
        waiting = self.tickets()
        self._tenants = {}
        return waiting

    def _entries(self) -> Iterator[Entry]:
        for own in self._tenants.values():
            yield from own


def _over(entry: Entry, now: float) -> bool:
    ticket, deadline = entry
    return ticket.cancelled or (deadline is not None and now >= deadline)
