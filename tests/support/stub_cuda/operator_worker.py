"""Runs in a process whose onnxruntime is the GPU build, whose CUDA is the stub and whose Triton interprets:
`VerifyAttention` by the library inside a graph, each launch executed by the interpreter when the stub's driver gets it.

Writes {case: {"problem", "launches", "copies"}} as JSON: where results differ from the reference's or why it was
refused, the variants that ran, and what was copied.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

sys.path[:0] = [str(Path(__file__).parents[1])]

from contract_cases import CASES, Case  # noqa: E402
from interpreted_kernels import interpret  # noqa: E402
from launch_records import mock_image, record  # noqa: E402
from run_operator import operator_model  # noqa: E402
from toy_bundle import toy_info  # noqa: E402

from dsc.bundle_schema.errors import DscError  # noqa: E402
from dsc.bundle_schema.model_info import KvLayer  # noqa: E402
from dsc.bundle_schema.tensors import DType  # noqa: E402
from dsc.kernels.attention_table import attention_variants  # noqa: E402
from dsc.kernels.cuda_op import find_cuda_op, state_table  # noqa: E402
from dsc.kernels.gpu_targets import architecture  # noqa: E402
from dsc.kernels.launch_record import KernelArg  # noqa: E402
from dsc.kernels.table import load_contract  # noqa: E402
from dsc.runtime.cuda_driver import CudaDriver  # noqa: E402
from dsc.runtime.cuda_stream import CudaStream  # noqa: E402
from dsc.runtime.device_attention import ONNX_TYPES, DeviceAttention  # noqa: E402
from dsc.runtime.device_kernels import DeviceKernels  # noqa: E402
from dsc.runtime.host import ORT_ERRORS, SessionSettings, create_session  # noqa: E402

ARCH = "sm_90"
CONTRACT = load_contract("VerifyAttention")
NAMES = [role.name for role in CONTRACT.inputs]
KINDS = {np.dtype("float16"): DType.FLOAT16, np.dtype("float32"): DType.FLOAT32, np.dtype("int32"): DType.INT32}
PLAIN = ("q", "k", "v", "k_pool", "v_pool", "past_lengths")
CELLS = {"i32": ctypes.c_int32, "fp32": ctypes.c_float}
LAUNCHED = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p))


def _long(label: str, shape: tuple[int, ...], *options: str, **attributes: Any) -> Case:
    axes = dict(zip(("B", "Hq", "Hkv", "S", "D", "M"), shape, strict=True))
    return Case(label, CONTRACT.name, axes, {"scale": 0.3, **attributes}, (*PLAIN, *options))


LONG = (
    _long("70 rows with sinks", (1, 6, 2, 70, 64, 200), "sinks"),
    _long("33 rows behind a window, 80 wide", (1, 3, 1, 33, 80, 150), window=40),
    _long("40 rows cut into parts", (1, 2, 1, 40, 64, 1100), "sinks"),
    _long("33 rows of two sequences", (2, 2, 1, 33, 64, 90)),
    _long("33 rows of a tree", (1, 2, 1, 33, 64, 90), "tree_mask"),
)


def _longest(made: dict[str, Any]) -> None:
    """Sequences that fill the pools."""
    made["past_lengths"][:] = made["k_pool"].shape[2] - made["k"].shape[2]


class Device:
    """The stub's driver, which executes by the interpreter what is launched.

    Attributes:
        launches: variants in the order in which they ran.
    """

    def __init__(self) -> None:
        self.driver = CudaDriver()
        self.stream = CudaStream(self.driver)
        self.launches: list[str] = []
        self.mock = ctypes.CDLL("libcuda.so.1")
        self.mock.mock_events.restype = ctypes.c_char_p
        self._callback = LAUNCHED(self._launched)
        self.mock.mock_on_launch(self._callback)

    def kernels(self, head_size: int, softcap: bool) -> DeviceKernels:
        """The kernels of one head size; entries are named after their variants."""
        found = attention_variants(head_size, "float16", architecture(ARCH), softcap=softcap)
        self._variants = {variant.name: variant for variant in found}
        records = {
            variant.name: record(
                kernel=variant.kernel, variant=variant.name, entry=variant.name, constants=variant.constants,
                args=tuple(KernelArg(name=name, type=kind) for name, kind in variant.signature), grid=variant.grid,
                divisible_by_16=variant.divisible_by_16, equals=variant.equals, at_most=variant.at_most,
                num_warps=variant.num_warps,
            )
            for variant in found
        }  # fmt: skip
        return DeviceKernels(self.driver, records, lambda member: mock_image(records[member]))

    def _launched(self, entry: bytes, grid: Any, params: Any) -> None:
        variant = self._variants[entry.decode()]
        cells = zip(variant.signature, params, strict=False)  # two null pointers follow
        values = {name: CELLS.get(kind, ctypes.c_uint64).from_address(at).value for (name, kind), at in cells}
        interpret(variant, tuple(grid[:3]), values)
        self.launches.append(variant.name)


def run(device: Device, case: Case) -> dict[str, np.ndarray]:
    """Outputs of the operator; raises what onnxruntime or the runtime raises."""
    made = case.make()
    halves = set(PLAIN) - {"past_lengths"}
    inputs = {name: array.astype(np.float16) if name in halves else array for name, array in made.items()}
    axes, softcap = case.axes, case.attributes.get("softcap", 0.0) > 0
    info = toy_info(kv_layers=(KvLayer(n_kv_heads=axes["Hkv"], head_dim=axes["D"]),))
    info = info.model_copy(update={"n_heads": axes["Hq"], "kv_dtype": DType.FLOAT16})
    attention = DeviceAttention(device.kernels(axes["D"], softcap), device.stream, info)
    attention.total_length[()] = made["past_lengths"].max() + axes["S"]
    options = {"device_id": "0", "user_compute_stream": str(device.stream.handle)}
    settings = SessionSettings("cuda", 1, tempfile.gettempdir(), find_cuda_op(), provider_options=options)
    state_table(settings.native, attention.table)
    outputs = [role.name for role in CONTRACT.outputs]
    model = operator_model(CONTRACT.name, inputs, NAMES, outputs, case.attributes, None)
    session = create_session(model, settings, case.label, 1)
    results = dict(zip(outputs, (np.full_like(inputs["q"], np.nan), inputs["k_pool"], inputs["v_pool"]), strict=True))
    binding = session.io_binding()
    for name, array in inputs.items():
        kind = 9 if array.dtype == bool else ONNX_TYPES[KINDS[array.dtype]]
        binding.bind_input(name, "cuda", 0, kind, array.shape, array.ctypes.data)
    for name, array in results.items():
        binding.bind_output(name, "cuda", 0, ONNX_TYPES[DType.FLOAT16], array.shape, array.ctypes.data)
    unsynchronised = ort.RunOptions()
    unsynchronised.add_run_config_entry("disable_synchronize_execution_providers", "1")
    device.mock.mock_reset()
    session.run_with_iobinding(binding, unsynchronised)
    return results


def judge(device: Device, case: Case) -> dict[str, Any]:
    """Compare one case with the reference."""
    device.launches.clear()
    halves = set(PLAIN) - {"past_lengths"}
    given = {n: a.astype(np.float16).astype(np.float32) if n in halves else a for n, a in case.make().items()}
    problem = ""
    try:
        found = run(device, case)
        for name, wanted in CONTRACT.reference(given, case.attributes).items():
            CONTRACT.assert_agrees(name, found[name].astype(wanted.dtype), wanted, "float16")
    except (*ORT_ERRORS, DscError) as error:
        problem = str(error)
    events = device.mock.mock_events().decode().splitlines()
    copies = [event for event in events if event.startswith(("copy", "set", "wait"))]
    return {"problem": problem, "launches": list(device.launches), "copies": copies}


def main() -> dict[str, Any]:
    device = Device()
    named = [case for case in CASES if case.contract == CONTRACT.name and "interpreted" in case.kinds]
    cases = (replace(case, edit=_longest) if "parts" in case.label else case for case in (*named, *LONG))
    return {case.label: judge(device, case) for case in cases}


if __name__ == "__main__":
    print(json.dumps(main()))
