"""Read an ONNX file with all its external data, wherever in the graph it is used and whatever its files are called.

A reference is followed only inside the model's folder: it is part of the model, not of the machine. Weights stay in
their files until they are written elsewhere, and are mapped when they are read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING

from dsc.bundle_schema.errors import ModelError

if TYPE_CHECKING:
    import onnx_ir as ir

ONNX_SUFFIX = ".onnx"
MAX_INLINE_NBYTES = 1 << 30
"""Bytes of the tensors that have to stay inside the graph's own file, which protobuf limits to 2 GiB."""


def onnx_file(path: Path) -> Path | None:
    """The ONNX file that `path` stands for: itself, or the only one of a directory; None when it stands for none.

    A directory with safetensors is a checkpoint, whatever else is in it.

    Raises:
        ModelError: a directory has several.
    """
    if not path.is_dir():
        return path if path.suffix.lower() == ONNX_SUFFIX else None
    found = sorted(path.glob(f"*{ONNX_SUFFIX}"))
    if not found or any(path.glob("*.safetensors")):
        return None
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ModelError(str(path), f"one {ONNX_SUFFIX} file is required, got {names}", "give the file itself")
    return found[0]


def read_onnx(path: Path) -> ir.Model:
    """The graph of an ONNX file; constants and the tensors of subgraphs become initializers of the main graph.

    Raises:
        ModelError: the file is no ONNX model, or a tensor's data is missing, too short or outside the folder.
    """
    import onnx
    import onnx_ir as ir
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from onnx_ir.passes.common import LiftConstantsToInitializersPass, LiftSubgraphInitializersToMainGraphPass
    from onnx_ir.serde import SerdeError

    try:
        model: ir.Model = ir.from_proto(onnx.load(path, load_external_data=False))
    except (DecodeError, SerdeError, ValueError, KeyError, OSError) as error:
        raise ModelError(str(path), f"an ONNX model is required, this cannot be read: {_first_line(error)}") from error
    _replace_tensors(model, _resolver(path))
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    LiftSubgraphInitializersToMainGraphPass()(model)
    _check_attributes(model, str(path))
    return model


def data_file(folder: Path, location: str, where: str) -> Path:
    """The file that a tensor's `location` names, links followed.

    Links may lead to other files of the folder, or from a snapshot of a Hugging Face cache to the same repository's
    blobs. A file with several hard links may be one of another place, so it is refused.

    Args:
        folder: the model's.
        where: file and tensor in errors.

    Raises:
        ModelError: the location leads elsewhere, or no regular file is there.
    """
    drive = PureWindowsPath(location)
    if not location or "\0" in location or os.path.isabs(location) or drive.anchor or ".." in drive.parts:
        raise ModelError(where, f"its data must lie inside the model's folder, got location {location!r}")
    real = Path(os.path.realpath(folder / location))
    if not any(real.is_relative_to(root) for root in _roots(folder)):
        raise ModelError(where, f"its data must lie inside the model's folder, {location!r} is a link out of it")
    try:
        found = real.stat()
    except OSError as error:
        raise ModelError(where, f"its data file {location!r} is required beside the graph: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(where, f"its data file {location!r} must be a regular file")
    if found.st_nlink > 1:
        raise ModelError(
            where,
            f"its data file {location!r} has {found.st_nlink} hard links, so it may belong to another place",
            "copy the file",
        )
    return real


def _roots(folder: Path) -> Iterator[Path]:
    """Where data may really lie."""
    yield Path(os.path.realpath(folder))
    for parent in (folder, *folder.parents):
        if parent.parent.name == "snapshots":
            yield Path(os.path.realpath(parent.parent.parent / "blobs"))


def _resolver(path: Path) -> Callable[[ir.TensorProtocol, str], ir.TensorProtocol]:
    """What replaces a tensor of the file at `path`: an external one reads the checked file when it is used."""
    import onnx_ir as ir

    folder = path.absolute().parent

    def resolve(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
        if not isinstance(tensor, ir.ExternalTensor):
            return tensor
        where = f"{path}: tensor {name!r}"
        file = data_file(folder, str(tensor.location), where)
        _check_extent(tensor, file.stat().st_size, where)
        mapped = partial(
            ir.ExternalTensor,
            file.name,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name or name,
            base_dir=file.parent,
        )
        # Not external any more: its content goes wherever the graph is written.
        return ir.LazyTensor(mapped, dtype=tensor.dtype, shape=tensor.shape, name=tensor.name or name)

    return resolve


def _check_extent(tensor: ir.ExternalTensor, file_nbytes: int, where: str) -> None:
    import onnx_ir as ir

    if tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        raise ModelError(where, f"numbers are required in external data, got {tensor.dtype.name}")
    if any(not isinstance(dim, int) or dim < 0 for dim in tensor.shape):
        raise ModelError(where, f"a shape of non-negative numbers is required, got {tensor.shape}")
    offset, length = tensor.offset or 0, tensor.nbytes if tensor.length is None else tensor.length
    if length != tensor.nbytes:
        raise ModelError(where, f"{tensor.nbytes} bytes are required for its shape, got {length}")
    if offset + length > file_nbytes:
        raise ModelError(
            where,
            f"bytes {offset} to {offset + length} of its data file are required, the file has {file_nbytes}",
            "the file is not whole",
        )


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _replace_tensors(model: ir.Model, replace: Callable[[ir.TensorProtocol, str], ir.TensorProtocol]) -> None:
    """Every tensor that the model holds, in initializers and attributes, subgraphs and functions included."""
    function_graphs = [graph for function in model.functions.values() for graph in function.subgraphs()]
    for graph in (*model.graphs(), *function_graphs):
        for name, value in graph.initializers.items():
            if value.const_value is not None:
                value.const_value = replace(value.const_value, name)
    _replace_in_attributes(model, replace)


def _replace_in_attributes(model: ir.Model, replace: Callable[[ir.TensorProtocol, str], ir.TensorProtocol]) -> None:
    import onnx_ir as ir

    for node in _nodes(model):
        for key, attribute in tuple(node.attributes.items()):
            if attribute.is_ref() or attribute.type not in (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS):
                continue
            single = attribute.type is ir.AttributeType.TENSOR
            tensors = [attribute.value] if single else attribute.value
            new = [replace(tensor, tensor.name or f"{key} of {_label(node)}") for tensor in tensors]
            node.attributes[key] = ir.Attr(key, attribute.type, new[0] if single else new)


def _check_attributes(model: ir.Model, where: str) -> None:
    """Tensors that could not become initializers are written inside the graph."""
    total = 0

    def count(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
        nonlocal total
        total += tensor.nbytes
        if total > MAX_INLINE_NBYTES:
            raise ModelError(
                f"{where}: tensor {name!r}", f"attributes may hold {MAX_INLINE_NBYTES} bytes in all, here are more"
            )
        return tensor

    _replace_in_attributes(model, count)


def _label(node: ir.Node) -> str:
    return f"node {node.name or node.outputs[0].name!r} ({node.op_type})"


def _first_line(error: BaseException) -> str:
    """What went wrong first: readers wrap it, layer by layer, in sentences about themselves."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
