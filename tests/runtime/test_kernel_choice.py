"""Selection of compiled kernels by device, shape and alignment."""

from __future__ import annotations

import re

import pytest
from launch_records import record

from dsc.bundle_schema.errors import KernelError
from dsc.runtime.kernel_choice import CudaDevice, KernelChoice, device_refusal

H100 = CudaDevice("H100", (9, 0), 132, 232448, 12090)
RTX3090 = CudaDevice("RTX 3090", (8, 6), 82, 101376, 12020)
SHAPE = {"rows": 8, "batch": 1, "heads": 2, "dtype": "float16"}


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({}, H100, ""),
        ({"arch": "sm_80"}, RTX3090, ""),
        ({"arch": "sm_86"}, CudaDevice("A100", (8, 0), 108, 166912, 12090), "built for sm_86, .* capability 8.0"),
        ({"arch": "sm_80"}, H100, "built for sm_80, the device has compute capability 9.0"),
        ({"arch": "sm_90"}, CudaDevice("next", (9, 1), 1, 232448, 13000), "built for sm_90"),
        ({"arch": "compute_80", "image": "ptx"}, CudaDevice("next", (15, 0), 1, 232448, 16000), ""),
        ({"arch": "compute_80", "image": "ptx"}, CudaDevice("T4", (7, 5), 1, 65536, 12090), "needs compute capability"),
        (
            {"arch": "sm_100", "minimum_driver": 13000},
            CudaDevice("B200", (10, 0), 1, 232448, 12080),
            "needs a CUDA 13.0",
        ),
        ({"shared": 163_840, "arch": "sm_80"}, RTX3090, "needs 163840 bytes of shared memory"),
        ({"num_ctas": 2}, H100, "needs clusters"),
        ({"global_scratch_size": 128}, H100, "needs scratch memory"),
        ({"arch": "gfx942", "image": "hsaco"}, H100, "not a CUDA architecture"),
    ],
)
def test_device_refusals_have_a_reason(changes, device, reason):
    found = device_refusal(record(**changes), device)
    assert re.search(reason, found) if reason else found == ""


def test_the_devices_own_image_goes_before_an_older_one_and_ptx():
    made = tuple(
        record(arch=arch, image="ptx" if arch.startswith("c") else "cubin", variant=arch)
        for arch in ("compute_80", "sm_80", "sm_86")
    )
    choice = KernelChoice(made, RTX3090)
    assert choice.choose("k", SHAPE).arch == "sm_86"
    assert KernelChoice(made[:2], RTX3090).choose("k", SHAPE).arch == "sm_80"
    assert KernelChoice(made, H100).choose("k", SHAPE).arch == "compute_80"
    assert set(KernelChoice(made, H100).refused) == {"sm_80 (sm_80)", "sm_86 (sm_86)"}


def test_shape_picks_the_smallest_tile_that_holds_it():
    small, large = record(variant="small"), record(variant="large", at_most={"rows": 4096})
    choice = KernelChoice((small, large), H100)
    assert choice.choose("k", SHAPE).variant == "small"
    assert choice.choose("k", {**SHAPE, "rows": 33}).variant == "large"


@pytest.mark.parametrize(
    ("axes", "pointers", "reason"),
    [
        ({**SHAPE, "rows": 33}, {}, "k_small: rows is 33, the variant serves at most 32"),
        ({**SHAPE, "dtype": "float32"}, {}, "k_small: dtype is float32, the variant serves float16"),
        ({**SHAPE, "heads": 70_000}, {}, "exceeds 65535"),
        (SHAPE, {"x_ptr": 8}, "k_small: x_ptr is not a multiple of 16"),
    ],
)
def test_no_variant_means_every_reason_is_told(axes, pointers, reason):
    with pytest.raises(KernelError, match=reason):
        KernelChoice((record(),), H100).choose("k", axes, pointers)


def test_a_bundle_for_another_device_says_so():
    with pytest.raises(KernelError, match=r"k_small \(sm_90\): built for sm_90, .* capability 8\.6"):
        KernelChoice((record(),), RTX3090).choose("k", SHAPE)
