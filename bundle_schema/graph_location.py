"""Where a graph's weights are: the one string in its bytes that changes when the bundle file is renamed.

A tensor may be anywhere in a graph, and protobuf has many spellings of one message. So the messages are walked as a
reader walks them: a search for the usual bytes would miss another file that is named in unusual ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from dsc.bundle_schema.bundle_errors import ForeignLocation
from dsc.bundle_schema.zip_layout import STORED_LOCATION, external_location

LEADS_TO = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        5: "TensorProto",
        6: "GraphProto",
        10: "TensorProto",
        11: "GraphProto",
        22: "SparseTensorProto",
        23: "SparseTensorProto",
    },
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
}
"""Of onnx.proto: message -> number of a field -> its message, for every way to a tensor."""

_NAME, _EXTERNAL_DATA = 8, 13  # of a tensor
_KEY = b"location"
# An entry of `external_data`: key (field 1), then value (field 2), whose size 256 is 80 02 as a varint.
_STORED = b"\x0a\x08" + _KEY + b"\x12\x80\x02" + STORED_LOCATION.encode()
_DEEPEST = 100  # messages in messages: protobuf's own limit
_HINT = "compile the model again, or get the bundle from whoever made it"


def relocate_graph(graph: bytes, file_name: str, where: str) -> bytes:
    """A stored graph whose weights lie in the file that is now called `file_name`.

    The length stays, so the protobuf stays valid.

    Args:
        graph: bytes of the member.
        file_name: the bundle's present name without its folder.
        where: the member's name, for the error.

    Raises:
        ForeignLocation: a tensor lies in another file, which could be anywhere on the machine; it is named. Or the
            bytes are not those of a graph, so that nobody can tell.
    """
    waiting = [("ModelProto", 0, len(graph), 0)]
    while waiting:
        message, start, end, depth = waiting.pop()
        if graph.find(_KEY, start, end) < 0:
            continue  # nearly all of a graph
        if depth > _DEEPEST:
            raise _not_a_graph(where, start)
        if message == "TensorProto":
            _check_tensor(graph, start, end, where)
            continue
        inner = LEADS_TO[message]
        waiting += [
            (inner[number], first, last, depth + 1)
            for number, first, last in _fields(graph, start, end, where)
            if number in inner
        ]
    return graph.replace(STORED_LOCATION.encode(), os.fsencode(external_location(file_name)))


def _check_tensor(graph: bytes, start: int, end: int, where: str) -> None:
    fields = [(number, graph[first:last]) for number, first, last in _fields(graph, start, end, where)]
    if any(number == _EXTERNAL_DATA and _KEY in data and data != _STORED for number, data in fields):
        name = next((data.decode(errors="replace") for number, data in fields if number == _NAME), "")
        what = "its data must lie in the bundle itself, not elsewhere"
        raise ForeignLocation(f"{where}: tensor {name!r}", what, _HINT)


def _fields(graph: bytes, start: int, end: int, where: str) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of each field of bytes of the message at ``graph[start:end]``."""
    at = start
    while at < end:
        tag, at = _varint(graph, at, end, where)
        first = at
        match tag & 7:
            case 0:  # a number of any length
                while at < end and graph[at] & 0x80:
                    at += 1
                at += 1
            case 1:
                at += 8
            case 2:
                size, first = _varint(graph, at, end, where)
                at = first + size
            case 5:
                at += 4
            case _:
                raise _not_a_graph(where, first)
        if at > end:
            raise _not_a_graph(where, first)
        if tag & 7 == 2:
            yield tag >> 3, first, at


def _varint(graph: bytes, start: int, end: int, where: str) -> tuple[int, int]:
    """A tag or a size, and where it ends.

    Only its shortest form and 32 bits are taken: readers differ on others, and some drop the bits above.
    """
    value = 0
    for index, byte in enumerate(graph[start : min(start + 5, end)]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            if (byte == 0 and index) or value >> 32:
                break
            return value, start + index + 1
    raise _not_a_graph(where, start)


def _not_a_graph(where: str, position: int) -> ForeignLocation:
    what = f"an ONNX graph as onnx writes it is required, byte {position} is none of one"
    return ForeignLocation(where, what, _HINT)
