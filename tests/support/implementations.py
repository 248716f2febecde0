"""Every way in which an operator is computed, by one signature: (contract, inputs, attributes, dtype) -> outputs."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from run_operator import operator_model, run_operator

from dsc.kernels.contract import KernelContract
from dsc.kernels.native import OPERATORS
from dsc.passes.attach_bodies import BODIES

GPU = (
    "KvCommit", "KvRollback", "MarkovWalk", "SpeculativeVerify", "TreeVerify", "VerifyAttention", "VerifyAttentionInt8",
)  # fmt: skip
SERVED = {"body": tuple(BODIES), "native": tuple(sorted(OPERATORS)), "interpreted": GPU, "gpu": GPU}


def run(kind: str, contract: KernelContract, inputs: dict[str, Any], attributes: dict[str, Any], dtype: str):
    """Outputs by name, as NumPy arrays; those of the type under test are widened to float32."""
    return {"body": _body, "native": _native, "interpreted": _interpreted, "gpu": _gpu}[kind](
        contract, inputs, attributes, dtype
    )


def _body(contract, inputs, attributes, dtype):
    names, outputs = [role.name for role in contract.inputs], _outputs(contract, inputs)
    bare = ir.from_proto(onnx.load_from_string(operator_model(contract.name, inputs, names, outputs, attributes, None)))
    function = import_module(BODIES[contract.name]).function_for(bare.graph[0])
    function.overload = ""
    return run_operator(contract.name, inputs, names, outputs, attributes, function)


def _outputs(contract, inputs):
    if contract.name == "KvRollback" and "pool" not in inputs:
        return ["lengths_out"]
    return [role.name for role in contract.outputs]


def _native(contract, inputs, attributes, dtype):
    from native_operator import run_native

    return run_native(contract, inputs, attributes, threads=2)


@functools.cache
def interpreter():
    """The kernels in Triton's interpreter; only where TRITON_INTERPRET=1 was set."""
    from interpreted_kernels import InterpretedKernels

    return InterpretedKernels()


def _interpreted(contract, inputs, attributes, dtype):
    return _on(interpreter(), "cpu", contract, inputs, attributes, dtype)


def _gpu(contract, inputs, attributes, dtype):
    from gpu_device import open_kernels

    return _on(open_kernels(), "cuda", contract, inputs, attributes, dtype)


def _on(kernels, device, contract, inputs, attributes, dtype):
    """Run the GPU kernels on a device's tensors."""
    import torch

    found = bound(kernels, device, contract, inputs, attributes, dtype).run()
    if device == "cuda":
        torch.cuda.synchronize()
    return {name: (t.float() if t.is_floating_point() else t).cpu().numpy() for name, t in found.items()}


def bound(kernels, device, contract, inputs, attributes, dtype):
    """An operator bound to a device's tensors; the roles of kind ``float`` take the type under test."""
    import torch

    from dsc.compiler.gpu_operators import bind_operator

    floats = {role.name for role in contract.inputs if role.kind == "float"}
    tensors = {}
    for name, array in inputs.items():
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(device)
        tensors[name] = tensor.to(getattr(torch, dtype)) if name in floats else tensor
    return bind_operator(kernels, contract, tensors, attributes)


def rounded(contract: KernelContract, inputs: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The inputs as they are after a trip through the type under test."""
    import torch

    if dtype == "float32":
        return inputs
    floats = {role.name for role in contract.inputs if role.kind == "float"}
    kind = getattr(torch, dtype)
    return {
        name: torch.from_numpy(array).to(kind).float().numpy() if name in floats else array
        for name, array in inputs.items()
    }
