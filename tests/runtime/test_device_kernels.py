"""Binding and launch order of a bundle's kernels, on the mock driver."""

from __future__ import annotations

import ctypes

import pytest
from launch_records import mock_image, record

from dsc.bundle_schema.errors import KernelError
from dsc.kernels.gpu_targets import architecture
from dsc.kernels.kernel_table import variants_for_model
from dsc.kernels.launch_record import KernelArg
from dsc.runtime.cuda_driver import CudaDriver
from dsc.runtime.device_kernels import DeviceKernels, VerifyTail, attention_parts, bind_verify, verify_parts


@pytest.fixture(scope="module")
def mock(mock_library):
    handle = ctypes.CDLL(mock_library)
    handle.mock_events.restype = ctypes.c_char_p
    return mock_library, handle


@pytest.fixture
def kernels(mock):
    mock[1].mock_reset()
    records = {}
    for variant in variants_for_model((64,), "float16", architecture("sm_90")):
        args = tuple(KernelArg(name=name, type=kind) for name, kind in variant.signature)
        records[f"kernels/sm_90/{variant.name}.cubin"] = record(
            kernel=variant.kernel, variant=variant.name, entry=variant.function, args=args, grid=variant.grid,
            divisible_by_16=variant.divisible_by_16, equals=variant.equals, at_most=variant.at_most,
            num_warps=variant.num_warps,
        )  # fmt: skip
    with CudaDriver(library=mock[0]) as driver:
        yield DeviceKernels(driver, records, lambda member: mock_image(records[member]))


ADDRESSES = {
    name: 0x1000 * (i + 1)
    for i, name in enumerate(
        ("logits_ptr", "drafts_ptr", "lengths_ptr", "best_ptr", "token_ptr", "sum_ptr", "cut_ptr", "accepted_ptr",
         "next_ptr", "cause_ptr", "uniforms_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "q_ptr")
    )
}  # fmt: skip


def launched(mock):
    return [line.split() for line in mock[1].mock_events().decode().splitlines() if line.startswith("launch")]


@pytest.mark.parametrize(
    ("tail", "entries"),
    [
        (VerifyTail(8, 4, 151_936), ["row_stats", "accept_greedy"]),
        (VerifyTail(2, 7, 32_000, mode="sampled", proposal="dense", rule="block"), ["row_stats", "accept_sampled"]),
        (VerifyTail(1, 4, 262_144, mode="sampled", truncated=True), ["row_cutoff", "accept_sampled"]),
    ],
)
def test_the_verdict_is_two_launches_in_order_on_one_stream(kernels, mock, tail, entries):
    for launch in bind_verify(kernels, tail, ADDRESSES):
        launch.run(0x77)
    found = launched(mock)
    assert [line[1] for line in found] == entries
    assert {line[line.index("stream") + 1] for line in found} == {"77"}
    assert found[0][3] == str(tail.batch * (tail.steps + 1))
    assert found[1][3:6] == [str(tail.batch), "1", "1"]
    assert found[0][found[0].index("args") + 1] == "1000"


def test_both_launches_agree_on_the_parts(kernels, mock):
    first, second = bind_verify(kernels, VerifyTail(1, 4, 151_936), ADDRESSES)
    assert first.blocks == (5, 19, 1)
    assert dict(zip((a.name for a in second.prepared.record.args), second.values, strict=True))["parts"] == 19
    assert VerifyTail(1, 4, 151_936).scratch_nbytes(132)["best_ptr"] == 4 * 5 * 19


def test_attention_takes_the_smallest_tile_and_fills_the_device(kernels):
    values = dict.fromkeys(
        ("q_ptr", "k_ptr", "v_ptr", "k_pool_ptr", "v_pool_ptr", "past_ptr", "sinks_ptr", "tree_ptr", "k_scale_ptr",
         "v_scale_ptr", "o_ptr", "part_ptr", "stat_ptr"), 64,
    )  # fmt: skip
    numbers = {"S": 5, "pool_rows": 9000, "kv_heads": 4, "groups": 3, "window": -1, "has_sinks": 0, "has_tree": 0}
    parts = attention_parts(4, 8192, 132)
    axes = {"batch": 1, "kv_heads": 4, "rows": 5, "packed_rows": 15, "parts": parts, "head_size": 64}
    axes |= {"dtype": "float16", "pool_dtype": "float16", "softcap": 0}
    bound = kernels.bind("dspark_verify_head_tiled", axes, {**values, **numbers, "scale": 0.125, "cap": 0.0})
    assert bound.prepared.record.variant == "verify_head_tiled_fp16_d64_16x128"
    assert bound.blocks == (1, 4, 16)
    bigger = kernels.bind(
        "dspark_verify_head_tiled", {**axes, "packed_rows": 300}, {**values, **numbers, "scale": 1, "cap": 0}
    )
    assert bigger.blocks == (3, 4, 16)
    with pytest.raises(KernelError, match="q_ptr is not a multiple of 16"):
        kernels.bind("dspark_verify_head_tiled", axes, {**values, "q_ptr": 72})
    with pytest.raises(KernelError, match="the argument S has no value"):
        kernels.bind("dspark_verify_head_tiled", axes, values)


@pytest.mark.parametrize(
    ("programs", "length", "parts"), [(1, 100, 1), (4, 8192, 16), (64, 100_000, 4), (1, 10**6, 64), (9999, 9999, 1)]
)
def test_parts_of_attention(programs, length, parts):
    assert attention_parts(programs, length, 132) == parts


def test_parts_of_the_verdict():
    assert verify_parts(40, 151_936, 132) == 14
    assert verify_parts(1, 300, 132) == 1
    assert verify_parts(10_000, 262_144, 132) == 1


def test_an_unknown_mode_and_a_vocabulary_beyond_the_kernels_are_refused(kernels):
    with pytest.raises(KernelError, match="mode must be one of greedy, sampled"):
        bind_verify(kernels, VerifyTail(1, 1, 100, mode="typical"), ADDRESSES)
    with pytest.raises(KernelError, match="vocab is 300000, the variant serves at most 262144"):
        bind_verify(kernels, VerifyTail(1, 1, 300_000), ADDRESSES)
