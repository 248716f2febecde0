"""The optional library that launches a bundle's attention kernels inside a graph on ONNX Runtime's CUDA provider.

Plain C without ONNX Runtime's headers or a CUDA toolkit (kernels/dspark_cuda_op.c), built at installation beside the
CPU kernels.  It knows no kernels of its own: a `Table` names the driver's launch function and the loaded variants.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_uint64, c_void_p

from dsc.kernels.native import NativeLibrary, installed

MAX_TILES = 4
MAX_HEAD_SIZES = 4
NEW_ROWS = 32
"""Rows that one launch takes; the library cuts a call of more, of one sequence, into pieces."""

PAST_ROOM = 256
"""Bytes before a piece's rows, for its past."""

TILED_ARGS = (
    "q_ptr", "k_ptr", "v_ptr", "k_pool_ptr", "v_pool_ptr", "past_ptr", "sinks_ptr", "tree_ptr", "k_scale_ptr",
    "v_scale_ptr", "o_ptr", "part_ptr", "stat_ptr", "S", "pool_rows", "kv_heads", "groups", "window", "has_sinks",
    "has_tree", "scale", "cap",
)  # fmt: skip
"""The arguments of the tiled kernel in the order in which the library passes them; `JOIN_ARGS` those of the other."""

JOIN_ARGS = ("part_ptr", "stat_ptr", "sinks_ptr", "o_ptr", "parts", "S", "q_heads", "has_sinks")

_NAME = "_dspark_cuda_op"


class Kernel(ctypes.Structure):
    """A loaded variant: the driver's function, threads and shared memory of a block, and the rows that it serves."""

    _fields_ = (
        ("function", c_void_p),
        ("threads", c_int32),
        ("shared", c_int32),
        ("rows", c_int32),
        ("most_packed", c_int32),
    )


class HeadKernels(ctypes.Structure):
    """The kernels for one head size, in the order in which they are tried."""

    _fields_ = (("head_size", c_int32), ("n_tiles", c_int32), ("tiles", Kernel * MAX_TILES), ("join", Kernel))


class Table(ctypes.Structure):
    """What the library launches; it must live as long as the sessions that were made with it."""

    _fields_ = (
        ("launch", c_void_p),
        ("copy", c_void_p),
        ("set", c_void_p),
        ("parts", c_uint64),
        ("stats", c_uint64),
        ("piece", c_uint64),
        ("capacity", c_int64),
        ("element_type", c_int32),
        ("softcap", c_int32),
        ("multiprocessors", c_int32),
        ("n_head_sizes", c_int32),
        ("length", c_void_p),
        ("heads", HeadKernels * MAX_HEAD_SIZES),
    )


def find_cuda_op() -> NativeLibrary:
    """The library that was built at installation, or why there is none."""
    path = installed(_NAME)
    if path is None:
        return NativeLibrary(None, "no library beside dsc.kernels (it was not built for want of a C compiler?)")
    try:
        size = ctypes.CDLL(str(path)).dspark_cuda_table_size()
    except (OSError, AttributeError) as error:
        return NativeLibrary(None, f"{path.name} cannot be used: {error} (install dsc again to build it anew)")
    if size != ctypes.sizeof(Table):
        return NativeLibrary(None, f"{path.name} is of another version (install dsc again)")
    return NativeLibrary(path, "")


def state_table(library: NativeLibrary, table: Table) -> None:
    """Give the table to the session that registers the library next."""
    ctypes.CDLL(str(library.path)).dspark_cuda_state(ctypes.byref(table))
