"""The launcher against a driver that executes nothing and remembers everything."""

from __future__ import annotations

import ctypes
import struct

import pytest
from launch_records import mock_image, record

from dsc.bundle_schema.errors import HostError, KernelError
from dsc.kernels.gpu_targets import architecture
from dsc.kernels.kernel_table import variants_for_model
from dsc.kernels.launch_record import KernelArg
from dsc.runtime.cuda_driver import CudaDriver


@pytest.fixture
def library(mock_library):
    return mock_library


@pytest.fixture
def mock(library):
    handle = ctypes.CDLL(library)
    handle.mock_events.restype = ctypes.c_char_p
    handle.mock_device(12090, 9, 0)
    handle.mock_reset()
    return handle


def launches(mock):
    return [line for line in mock.mock_events().decode().splitlines() if line.startswith("launch")]


def test_a_launch_passes_grid_block_shared_memory_stream_and_every_argument(library, mock):
    made = record()
    with CudaDriver(library=library) as driver:
        kernel = driver.prepare(made, mock_image(made))
        kernel(made.blocks({"rows": 33, "batch": 2, "heads": 5}), 0x77, [0x7F0000001000, 0x10, -3, 1 << 40, 0.25])
    scale = struct.unpack("<I", struct.pack("<f", 0.25))[0]
    assert launches(mock) == [
        "launch k_entry grid 3 10 1 block 128 1 1 shared 1024 stream 77 args "
        f"7f0000001000 10 fffffffd 10000000000 {scale:x} 0 0"
    ]


def test_every_declared_kernel_is_launched_with_its_own_arguments_and_two_null_pointers(library, mock):
    variants = variants_for_model((64, 256), "float16", architecture("sm_90"), markov=True)
    axes = dict.fromkeys(("batch", "rows", "kv_heads", "q_heads", "parts", "pools", "entries"), 3)
    axes["packed_rows"] = 33
    with CudaDriver(library=library) as driver:
        for variant in variants:
            args = tuple(KernelArg(name=name, type=kind) for name, kind in variant.signature)
            made = record(
                entry=variant.function, args=args, grid=variant.grid, divisible_by_16=variant.divisible_by_16,
                num_warps=variant.num_warps, shared=100_000,
            )  # fmt: skip
            values = [16 * (i + 1) if arg.is_pointer else i + 1 for i, arg in enumerate(args)]
            driver.prepare(made, mock_image(made))(made.blocks(axes), 5, values)
            tail = launches(mock)[-1].split()
            assert tail[7:10] == [f"{32 * variant.num_warps}", "1", "1"]
            passed = tail[tail.index("args") + 1 :]
            assert passed[-2:] == ["0", "0"]
            wanted = [
                struct.pack("<f", v) if arg.type == "fp32" else struct.pack("<q", v)
                for v, arg in zip(values, args, strict=True)
            ]
            assert [int(p, 16) for p in passed[:-2]] == [int.from_bytes(w, "little") for w in wanted]
            mock.mock_reset()


def test_a_module_is_loaded_once_and_unloaded_with_the_context_released(library, mock):
    made = record()
    with CudaDriver(library=library) as driver:
        driver.prepare(made, mock_image(made))
        driver.prepare(made, mock_image(made))
        assert mock.mock_retained() == 1
        assert driver.device.name == "Mock GPU"
        assert (driver.device.capability, driver.device.multiprocessors) == ((9, 0), 132)
    assert mock.mock_events().decode().splitlines() == ["load", "unload"]
    assert mock.mock_retained() == 0


def test_large_dynamic_shared_memory_is_asked_for_before_the_launch(library, mock):
    made = record(shared=160_000)
    with CudaDriver(library=library) as driver:
        driver.prepare(made, mock_image(made))((1, 1, 1), 0, [16, 16, 0, 0, 0.0])
    assert "shared 160000" in launches(mock)[0]


@pytest.mark.parametrize(
    ("blocks", "values", "reason"),
    [
        ((1, 1, 1), [8, 16, 0, 0, 0.0], "x_ptr must be a multiple of 16"),
        ((1, 1, 1), [16, 16, 0, 0], "takes 5 arguments, got 4"),
        ((0, 1, 1), [16, 16, 0, 0, 0.0], "refused the launch"),
    ],
)
def test_a_wrong_launch_is_refused_with_its_reason(library, mock, blocks, values, reason):
    made = record()
    with CudaDriver(library=library) as driver, pytest.raises(KernelError, match=reason):
        driver.prepare(made, mock_image(made))(blocks, 0, values)
    assert launches(mock) == []


def test_without_a_driver_the_error_names_the_library():
    with pytest.raises(HostError, match=r"libdsc-no-such-cuda\.so: the CUDA driver library cannot be loaded"):
        CudaDriver(library="libdsc-no-such-cuda.so")


def test_a_library_that_is_no_driver_is_refused():
    with pytest.raises(HostError, match="is not a usable CUDA driver library"):
        CudaDriver(library="libc.so.6")


def test_a_missing_device_is_named_by_the_driver(library):
    with pytest.raises(HostError, match="cuDeviceGet failed with code 101: invalid device ordinal"):
        CudaDriver(ordinal=3, library=library)


def test_a_wrong_entry_is_an_error(library):
    made = record()
    with CudaDriver(library=library) as driver, pytest.raises(HostError, match="cuModuleGetFunction"):
        driver.prepare(made, b"another 8")
