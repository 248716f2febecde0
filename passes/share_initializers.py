"""Equal tensors once: within a graph, and between the graphs of one bundle."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from dsc.passes.base import GraphPass, PassResult
from dsc.passes.graph_edit import tensor_dims

ContentKey = tuple[str, int]


@dataclass(frozen=True)
class ShareInitializersPass(GraphPass):
    """Let equal initializers of a graph be one.

    ::

        y = Mul(Add(x, a), b)   a == b  ->  y = Mul(Add(x, a), a)

    Rules:
        1. Equal means the same element type, shape and bytes.
        2. The first one in the graph stays, under its name.
        3. Equal bytes seen under two shapes stay two initializers, but a bundle stores the bytes once.
    """

    name: ClassVar[str] = "share-initializers"

    def call(self, model: ir.Model) -> PassResult:
        """Merge equal initializers."""
        graph = model.graph
        seen: dict[object, ir.Value] = {}
        fired = 0
        for name, value in list(graph.initializers.items()):
            tensor = value.const_value
            if tensor is None or value.is_graph_output() or value.is_graph_input():
                continue
            first = seen.setdefault((tensor.dtype, tensor_dims(tensor), content_key(tensor)), value)
            if first is value:
                continue
            value.replace_all_uses_with(first)
            graph.initializers.pop(name)
            fired += 1
        return PassResult(fired)


@dataclass(frozen=True)
class SharedBytes:
    """What sharing between graphs found.

    Attributes:
        n_shared: initializers whose bytes another initializer already had.
        nbytes_before, nbytes_after: bytes of all initializers, and of the different ones.
    """

    n_shared: int
    nbytes_before: int
    nbytes_after: int


def content_key(tensor: ir.TensorProtocol) -> ContentKey:
    """What decides that two tensors are the same bytes: SHA-256 and size. A lazy tensor is evaluated and dropped."""
    content = tensor.tobytes()
    return hashlib.sha256(content).hexdigest(), len(content)


def share_between(models: Iterable[ir.Model]) -> SharedBytes:
    """Let equal tensors of several graphs be the same object, so that a bundle writes them once.

    Names, shapes and nodes of every graph stay; only `const_value` changes.
    """
    seen: dict[object, ir.TensorProtocol] = {}
    sizes: dict[ContentKey, int] = {}
    before = shared = 0
    for model in models:
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is None:
                continue
            key = content_key(tensor)
            shared += key in sizes
            before += key[1]
            sizes[key] = key[1]
            value.const_value = seen.setdefault((tensor.dtype, tensor_dims(tensor), key), tensor)
    return SharedBytes(shared, before, sum(sizes.values()))
