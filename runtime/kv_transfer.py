"""One sequence's keys and values on their way to another place, while it goes on being used where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from dsc.bundle_schema.kv_plan import Owner
from dsc.runtime.kv_arena import KvZone

Pools = dict[str, NDArray[np.generic]]
_PIECE_NBYTES = 2**20  # copied between two looks at the clock


class KvTransfer:
    """Copies what is valid, in pieces, and again what has changed since: nothing is lost by stopping after any piece.

    Args:
        zones: of the sequence, by model.
        places: graph input name -> array [1, Hkv, rows, D], where each zone is to be; rows may differ from the zone's.
        secure: overwrite copies of rows that hold no more.
    """

    def __init__(self, zones: Mapping[Owner, KvZone], places: Mapping[Owner, Pools], secure: bool = False) -> None:
        self._secure = secure
        self.places = places
        self._zones = zones
        self._copied = {(owner, name): 0 for owner, pools in places.items() for name in pools}
        for zone in zones.values():
            zone.settled = 0

    def step(self, has_time: Callable[[], bool]) -> bool:
        """Copy at least one piece if there is any, then go on while there is time; says whether all is copied."""
        self._forget_rewound()
        for _ in self._pieces():
            if not has_time():
                break
        return all(done == self._zones[owner].length for (owner, _), done in self._copied.items())

    def _forget_rewound(self) -> None:
        """Rows that a rewind has dropped since may have been written anew; their copies are no one's."""
        for owner, name in self._copied:
            self._keep(owner, name, self._zones[owner].settled)
        for zone in self._zones.values():
            zone.settled = zone.length

    def undo(self) -> None:
        """Start again; what has been copied is overwritten if it has to be."""
        for owner, name in self._copied:
            self._keep(owner, name, 0)

    def _keep(self, owner: Owner, name: str, n_rows: int) -> None:
        done, place = self._copied[owner, name], self.places[owner][name]
        if self._secure and n_rows < done:
            place[:, :, np.arange(n_rows, min(done, n_rows + place.shape[2])) % place.shape[2]] = 0
        self._copied[owner, name] = min(n_rows, done)

    def _pieces(self) -> Iterator[None]:
        """Copy a piece each time."""
        for (owner, name), done in list(self._copied.items()):
            zone = self._zones[owner]
            source, place = zone.pools[name], self.places[owner][name]
            start = max(done, first_common(source, place, zone.length))
            row_nbytes = source.shape[1] * source.shape[3] * source.itemsize
            piece = max(_PIECE_NBYTES // row_nbytes, 1)
            while start < zone.length:
                end = min(start + piece, zone.length)
                copy_positions(source, place, start, end)
                self._copied[owner, name] = start = end
                yield


def first_common(source: NDArray[np.generic], place: NDArray[np.generic], end: int) -> int:
    """The first position before `end` that both pools [..., rows, D] have a row for: of a ring the newest are left."""
    n_rows: int = min(source.shape[-2], place.shape[-2])
    return max(0, end - n_rows)


def copy_positions(source: NDArray[np.generic], place: NDArray[np.generic], start: int, end: int) -> None:
    """Copy positions start .. end - 1 between pools [..., rows, D] that keep position p in row p mod rows."""
    while start < end:
        origin, target = start % source.shape[-2], start % place.shape[-2]
        count = min(end - start, source.shape[-2] - origin, place.shape[-2] - target)
        place[..., target : target + count, :] = source[..., origin : origin + count, :]
        start += count
