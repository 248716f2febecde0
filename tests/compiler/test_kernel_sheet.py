"""What `dsc kernels` tells of kernels on a machine without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is an extra of the compiler")

from launch_records import record

from dsc.bundle_schema.errors import HostError, KernelError, RequestError
from dsc.compiler.kernel_sheet import find_variant, list_kernels, occupancy, require_gpu, show_kernel
from dsc.kernels.gpu_targets import architecture
from dsc.kernels.launch_record import Resources


def test_the_list_has_every_kernel_with_variants():
    lines = list_kernels("sm_90")
    assert {line.kernel for line in lines} >= {"dspark_verify_head_tiled", "dspark_speculative_verify"}
    assert all(line.variants and line.meaning for line in lines)
    assert len({name for line in lines for name in line.variants}) == sum(len(line.variants) for line in lines)


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "blocks", "limit"),
    [
        (24, 4, 0, 16, "threads"),
        (255, 8, 0, 1, "registers"),
        (128, 4, 0, 4, "registers"),
        (40, 4, 100_000, 2, "shared memory"),
        (16, 1, 0, 32, "block slots"),
    ],
)
def test_occupancy_of_an_h100(registers, warps, shared, blocks, limit):
    used = Resources(registers=registers, stack=0, shared=0, local=0)
    found = occupancy(record(num_warps=warps, shared=shared, resources=used), architecture("sm_90"))
    assert found is not None
    assert (found.blocks, found.limit, found.warps) == (blocks, limit, blocks * warps)
    assert found.share == blocks * warps / 64


def test_no_occupancy_without_a_register_count():
    assert occupancy(record(resources=None), architecture("sm_90")) is None


def test_the_sheet_of_the_argmax_is_one_read_of_the_logits(tmp_path):
    sheet = show_kernel("verify_row_stats_argmax", "sm_90", {"batch": 8, "rows": 5, "vocab": 152_064}, cache=tmp_path)
    assert sheet.nbytes == 4 * 8 * 5 * 152_064
    assert (sheet.bound, sheet.card) == ("memory", "H100 SXM")
    assert sheet.roofline_us == pytest.approx(sheet.nbytes / 3.35e12 * 1e6)
    assert sheet.occupancy is not None
    assert sheet.occupancy.blocks >= 1
    assert replace(show_kernel("verify_row_stats_argmax", "sm_90", sheet.axes, cache=tmp_path)) == sheet


def test_attention_bytes_do_not_depend_on_draft_rows_but_for_the_rows_themselves(tmp_path):
    name = "verify_head_tiled_fp16_d64_16x128"
    one, eight = (show_kernel(name, "sm_90", {"rows": rows, "groups": 2}, cache=tmp_path) for rows in (1, 8))
    per_row = 8 * 64 * (2 * 2 * 2 + 2 * 4)
    assert eight.nbytes - one.nbytes == 7 * per_row
    assert one.flops * 8 < eight.flops < one.flops * 8.1


def test_wrong_names_say_what_exists():
    with pytest.raises(KernelError, match="known: sm_80"):
        list_kernels("sm_999")
    with pytest.raises(RequestError, match="dspark_kv_commit"):
        find_variant("nothing", "sm_90")
    with pytest.raises(RequestError, match="it has batch, rows, vocab"):
        show_kernel("verify_row_stats_argmax", "sm_90", {"heads": 3})


def test_bench_without_a_gpu_is_refused(monkeypatch):
    def no_driver(*_):
        raise HostError("libcuda.so.1", "the CUDA driver library cannot be loaded")

    monkeypatch.setattr("dsc.runtime.cuda_driver.CudaDriver", no_driver)
    with pytest.raises(HostError, match=r"dsc kernels bench: a CUDA GPU is required.*dsc kernels show works without"):
        require_gpu()
