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
        places: graph input name -> array [1, Hkv, rows, D], where each zone is to be; rows may differ from the zone's,
            but not once a ring's have been written over.
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
            n_rows = source.shape[2]
            start = max(done, zone.length - n_rows)  # of a ring only the newest rows are left
            row_nbytes = source.shape[1] * source.shape[3] * source.itemsize
            piece = max(_PIECE_NBYTES // row_nbytes, 1)
            while start < zone.length:
                # A ring's rows wrap around; its two pools have the same number of rows.
                end = min(start + piece, zone.length, (start // n_rows + 1) * n_rows)
                rows = slice(start % n_rows, start % n_rows + end - start)
                place[:, :, rows] = source[:, :, rows]
                self._copied[owner, name] = start = end
                yield
