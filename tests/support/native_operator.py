"""Run one `ai.dspark` node by the native library."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from run_operator import operator_model

from dsc.kernels import native
from dsc.kernels.contract import KernelContract
from dsc.kernels.interleaved_matmul import INTERLEAVED_MATMUL, interleaved
from dsc.kernels.verify_attention import VERIFY_ATTENTION


@functools.cache
def library() -> Path:
    """The library of the present sources; skips the test where it cannot be built or run."""
    folder = Path(tempfile.gettempdir()) / "dsc-native-test"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler to build the native kernels with")
    native.build(folder)
    found = native.find_library(folder)
    if found.path is None:
        pytest.skip(found.reason)
    return found.path


def session_of(
    contract: KernelContract,
    inputs: Mapping[str, np.ndarray],
    attributes: Mapping[str, Any],
    threads: int = 1,
    function: ir.Function | None = None,
    overload: str = "",
) -> ort.InferenceSession:
    """A session of one node with those inputs; its body, if any, has that overload."""
    names = [role.name for role in contract.inputs]
    outputs = [role.name for role in contract.outputs]
    model = operator_model(contract.name, inputs, names, outputs, attributes, function)
    if overload:
        proto = onnx.load_from_string(model)
        proto.graph.node[0].overload = overload
        model = proto.SerializeToString()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.register_custom_ops_library(str(library()))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_native(contract, inputs, attributes, threads=1) -> dict[str, np.ndarray]:
    """The node's outputs by name."""
    found = session_of(contract, inputs, attributes, threads).run(None, dict(inputs))
    return dict(zip([role.name for role in contract.outputs], found, strict=True))


def matmul_attributes(inputs, bits) -> dict[str, int]:
    """The attributes of an InterleavedMatMul node that multiplies by these rows."""
    n, groups, _ = inputs["qweight"].shape
    return {"bits": bits, "K": groups * 32, "N": n, "block": 32}


def multiply(inputs, bits, threads=1) -> np.ndarray:
    """y of InterleavedMatMul from the inputs of BlockMatMul."""
    return run_native(INTERLEAVED_MATMUL, interleaved(inputs), matmul_attributes(inputs, bits), threads)["y"]


def attend(inputs, attributes, threads=1) -> dict[str, np.ndarray]:
    """Outputs of VerifyAttention."""
    return run_native(VERIFY_ATTENTION, inputs, attributes, threads)
