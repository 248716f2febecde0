"""Where a graph's weights are: the one string in its bytes that changes when the bundle file is renamed."""

from __future__ import annotations

import os

from dsc.bundle_schema.bundle_errors import ForeignLocation
from dsc.bundle_schema.zip_layout import STORED_LOCATION, external_location

# In ONNX's protobuf an entry of `external_data` is key (field 1) "location", then value (field 2).
_KEY = b"\x0a\x08location"
_STORED = _KEY + b"\x12\x80\x02" + STORED_LOCATION.encode()  # 256 as a varint is 80 02


def relocate_graph(graph: bytes, file_name: str, where: str) -> bytes:
    """A stored graph whose weights lie in the file that is now called `file_name`.

    The length stays, so the protobuf stays valid without being parsed.

    Args:
        graph: bytes of the member.
        file_name: the bundle's present name without its folder.
        where: the member's name, for the error.

    Raises:
        ForeignLocation: the graph names another file, which could be anywhere on the machine.
    """
    foreign = graph.count(_KEY) - graph.count(_STORED)
    if foreign:
        raise ForeignLocation(where, f"weights must lie in the bundle itself, got {foreign} in other files")
    return graph.replace(STORED_LOCATION.encode(), os.fsencode(external_location(file_name)))
