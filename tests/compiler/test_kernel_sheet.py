"""What `dsc kernels` tells of kernels on a machine without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is an extra of the compiler")

from launch_records import record
from typer.testing import CliRunner

from dsc.bundle_schema.errors import KernelError, RequestError
from dsc.compiler.cli import app
from dsc.compiler.kernel_sheet import _cost, _sizes, find_variant, list_kernels, occupancy, show_kernel
from dsc.kernels.gpu_targets import architecture
from dsc.kernels.kernel_table import KERNELS, all_variants
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
    assert eight.flops == 8 * one.flops


def test_wrong_names_say_what_exists():
    with pytest.raises(KernelError, match="known: sm_80"):
        list_kernels("sm_999")
    with pytest.raises(RequestError, match="dspark_kv_commit"):
        find_variant("nothing", "sm_90")
    with pytest.raises(RequestError, match="it has batch, rows, vocab"):
        show_kernel("verify_row_stats_argmax", "sm_90", {"heads": 3})


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_every_kernel_has_a_sheet(name, tmp_path):
    variants = [variant for variant in all_variants("sm_80") if variant.kernel == name]
    for variant in {variant.function: variant for variant in variants}.values():
        nbytes, flops = _cost(variant, _sizes(variant, {}))
        assert nbytes > 0
        assert (flops == 0) == (variant.function in ("kv_commit", "kv_rollback", "kv_erase"))


def test_an_int8_pool_moves_half_the_bytes_of_a_16_bit_one():
    for function, narrow, wide in (("kv_commit", "_int8_", "_int16_"), ("verify_head_tiled", "_i8_", "_16x")):
        made = [v for v in all_variants("sm_80") if v.function == function and v.constants["HEAD_SIZE"] == 128]
        one = next(v for v in made if narrow in v.name)
        two = next(v for v in made if wide in v.name and "_i8" not in v.name)
        sizes = _sizes(one, {"length": 10**6} if function == "verify_head_tiled" else {})
        assert _cost(two, sizes)[0] == pytest.approx(2 * _cost(one, sizes)[0], rel=1e-3)


@pytest.mark.parametrize(
    ("axis", "reason"),
    [
        ("batch", "--axis: name=size is required, got 'batch'"),
        ("batch=-1", "--axis: name=size is required, got 'batch=-1'"),
        ("batch=x", "--axis: name=size is required"),
        ("batch=0", "--axis batch: at least 1 is required, got 0"),
        ("heads=2", "--axis heads: dspark_speculative_verify has no such axis (it has batch, rows, vocab)"),
    ],
)
def test_wrong_axes_are_refused_before_anything_is_compiled(axis, reason, monkeypatch):
    monkeypatch.setattr("dsc.compiler.kernel_sheet.compile_kernels", lambda *_, **__: pytest.fail("compiled"))
    done = CliRunner().invoke(app, ["kernels", "show", "verify_accept_greedy", "--axis", axis])
    assert isinstance(done.exception, RequestError)
    assert reason in str(done.exception)


def test_the_sheet_as_the_command_prints_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ["kernels", "show", "verify_accept_greedy", "--arch", "sm_80", "--axis", "batch=8", "--json"]
    found = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    assert found["arch"] == "sm_80"
    assert found["axes"] == "batch 8, rows 5, vocab 151936"
    assert {"registers", "stack", "shared", "local", "occupancy", "bytes moved", "FLOP"} <= set(found)
    assert "computed, not measured" in found["roofline on A100 SXM 80 GB"]
