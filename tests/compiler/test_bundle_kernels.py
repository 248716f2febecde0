"""A bundle compiled for CUDA without a GPU: what lies in it, that it is whole, and what a device would use of it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compile_for_cuda import ARCH, FEW, compile_few, kernel_model_dir

pytest.importorskip("triton", reason="Triton is an extra of the compiler")

from dsc.bundle_schema.container import open_bundle
from dsc.bundle_schema.errors import BundleError, HostError, RequestError
from dsc.bundle_schema.kv_plan import PLAN_NAMES, check_plan, parse_plan
from dsc.compiler.bundle_kernels import check_kernels, device_report, kernel_rows, kernels_section
from dsc.compiler.bundle_tools import check_bundle
from dsc.compiler.inspect import inspect_bundle
from dsc.compiler.plan_report import plan_report
from dsc.kernels.bundle_members import launch_records

SUPPORT = Path(__file__).resolve().parents[1] / "support"
HALF_POOLS = {"float16"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return kernel_model_dir(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def bundle(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda")
    compile_few(source, folder / "tiny.dsmodel", folder / "cache")
    return folder / "tiny.dsmodel"


def test_kernels_lie_in_the_bundle_with_records_that_describe_them(bundle):
    with open_bundle(bundle) as opened:
        manifest = opened.manifest
        records = launch_records(manifest.kernels)
        assert {record.variant for record in records.values()} == set(FEW)
        for member, record in records.items():
            assert member == f"kernels/{ARCH}/{record.variant}.cubin"
            assert opened.read(member)[:4] == b"\x7fELF"
            assert record.sha256 == opened.member(member).sha256
            assert record.resources is not None
            assert (record.resources.stack, record.resources.local) == (0, 0)
            assert not {"LDL", "STL"} & record.opcodes.keys()
        tiled = next(record for record in records.values() if record.kernel == "dspark_verify_head_tiled")
        assert tiled.opcodes["HMMA"] > 0
        assert (manifest.created_by["triton"], manifest.created_by["ptxas"]) == ("3.8.0", "12.9.86")
        assert (manifest.recipe["backends"], manifest.recipe["archs"]) == (["cpu", "cuda"], [ARCH])


def test_the_cuda_graph_has_half_precision_pools_and_float32_logits_and_shares_blocks(bundle):
    with open_bundle(bundle) as opened:
        manifest = opened.manifest
        users = [{user.partition(":")[0] for user in tensor.users} for tensor in opened.weights()]
        for entry, precision in ((manifest.target, "fp16"), (manifest.draft.model, "int8")):
            (graph,) = [graph for graph in entry.graphs if graph.backend == "cuda"]
            assert (graph.role, graph.precision) == ("forward", precision)
            assert graph.operators["com.microsoft::GroupQueryAttention"] == 2
            pools = {spec.dtype.value for spec in (*graph.inputs, *graph.outputs) if "_pool" in spec.name}
            assert pools == HALF_POOLS
            assert next(spec.dtype for spec in graph.outputs if spec.name == "logits") == "float32"
    shared = [members for members in users if {"draft/graph.onnx", "draft/graph.cuda.onnx"} <= members]
    assert len(shared) >= 9  # the codes of every matrix of the int8 draft


def test_the_plan_for_cuda_is_sound_and_takes_half(bundle):
    with open_bundle(bundle) as opened:
        manifest = opened.manifest
        plans = {backend: parse_plan(opened.read(name)) for backend, name in PLAN_NAMES.items()}
    draft = manifest.draft.model
    assert draft is not None
    check_plan(plans["cuda"], manifest.target.info_on("cuda"), draft.info_on("cuda"))
    for backend, dtype in (("cpu", "float32"), ("cuda", "float16")):
        for length in (None, 100):  # the bundle's own plan, and one for another length
            report, _ = plan_report(bundle, length, None, None, backend)
            assert {slot["dtype"] for slot in report["slots"]} == {dtype}
    with pytest.raises(RequestError, match="one of cpu, cuda is required, got 'rocm'"):
        plan_report(bundle, None, None, None, "rocm")
    assert {slot.dtype.value for slot in plans["cuda"].slots} == HALF_POOLS
    assert 2 * sum(slot.nbytes for slot in plans["cuda"].slots) == sum(slot.nbytes for slot in plans["cpu"].slots)


def test_inspect_and_check_and_list_say_what_is_there(bundle):
    report = inspect_bundle(bundle)
    (line,) = report["kernels"].values()
    assert line.startswith("4 kernels, ")
    assert line.endswith(", driver of CUDA 12.0 or newer")
    assert report["kv_plan cuda"]["element type"] == "float16"
    assert check_bundle(bundle)["checks"]["kernels"] == {"ok": True, "detail": f"4 kernels for {ARCH}"}
    rows = {row["variant"]: row for row in kernel_rows(bundle)}
    assert rows.keys() == set(FEW)
    assert rows["verify_accept_greedy"]["registers"] > 0
    card = next(text for text in report["members"] if text == "card.md")
    with open_bundle(bundle) as opened:
        assert f"| GPU kernels (compiled, not run) | {ARCH} |" in opened.read(card).decode()


@pytest.mark.slow
def test_a_graph_that_a_model_cannot_have_is_named_with_the_reason(tiny_source, tmp_path):
    compile_few(tiny_source, tmp_path / "tiny.dsmodel", tmp_path / "cache", cuda_attention="dspark")
    report = inspect_bundle(tmp_path / "tiny.dsmodel")
    for owner in ("target", "draft"):
        assert f"graph {owner}/graph.cuda.native.onnx" not in report
        missing = f"no graph of the {owner} for the bundle's own attention kernels"
        assert report["kernels"][missing] == "head size 16 has none"


def changed(opened, **fields):
    """The open bundle as if the manifest's first kernel had other metadata."""
    first, *rest = opened.manifest.kernels
    other = first.model_copy(update={"metadata": {**first.metadata, **fields}, "arch": fields.get("arch", first.arch)})
    return dataclasses.replace(opened, manifest=opened.manifest.model_copy(update={"kernels": (other, *rest)}))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sha256": "0" * 64}, "its record describes other code"),
        ({"arch": "sm_70"}, "the architecture sm_70 is not known"),
        ({"image": "ptx"}, "sm_80 takes a cubin, the record describes a ptx"),
        ({"num_warps": "four"}, "num_warps"),
    ],
)
def test_a_record_that_does_not_fit_its_code_fails_the_check(bundle, fields, reason):
    with open_bundle(bundle) as opened, pytest.raises(BundleError, match=reason):
        check_kernels(changed(opened, **fields))


def verdicts(bundle: Path, device: str, driver: str | None = None) -> dict[str, str]:
    return device_report(bundle, device, driver)["kernels"]


def test_a_device_uses_the_image_of_its_architecture_or_of_an_older_minor(bundle):
    for device in ("sm_80", "sm_86", "sm_89"):
        chosen = verdicts(bundle, device)
        assert len(chosen) == len(FEW)
        assert {text.partition(" ")[0] for text in chosen.values()} == set(FEW)
    assert set(verdicts(bundle, "sm_90").values()) == {"none: built for sm_80, the device has compute capability 9.0"}
    assert set(verdicts(bundle, "sm_80", "11.8").values()) == {"none: needs a CUDA 12.0 driver, this one is 11.8"}


def test_a_round_that_no_variant_serves_is_refused_by_shape(bundle, tmp_path):
    from dsc.bundle_schema.container import rewrite_members
    from dsc.bundle_schema.dflash_config import DFLASH_CONFIG_NAME, apply_override, dump_config, parse_config

    wide = tmp_path / "wide.dsmodel"
    with open_bundle(bundle) as opened:
        config = parse_config(opened.read(DFLASH_CONFIG_NAME))
    wider = apply_override(config, {"windows.default": 12, "windows.max": 12})
    rewrite_members(bundle, {DFLASH_CONFIG_NAME: dump_config(wider)}, wide)
    refused = [text for text in verdicts(wide, "sm_80").values() if text.startswith("none")]
    assert refused == ["none: verify_head_tiled_fp16_d64_16x128: packed_rows is 26, the variant serves at most 16"]


def test_without_a_device_or_a_cuda_graph_the_cpu_graphs_run(bundle, tiny_bundle):
    assert device_report(bundle, "none", None)["device"]["runs"] == "the CPU graphs: no CUDA device"
    assert "the bundle has no CUDA graph" in device_report(tiny_bundle, "sm_90", None)["device"]["runs"]
    with open_bundle(tiny_bundle) as opened:
        assert kernels_section(opened.manifest) == {"GPU kernels": "none in this bundle"}
        assert check_kernels(opened) == "none"


@pytest.mark.parametrize(
    ("device", "driver", "reason"),
    [
        ("gfx942", None, "one of sm_80, sm_86"),
        ("compute_80", None, "one of sm_80"),
        ("cuda", None, "a device's number"),
        ("sm_80", "twelve", "a CUDA version such as 12.4"),
        ("0", "12.4", "named by its architecture"),
    ],
)
def test_a_device_that_does_not_exist_is_refused_with_those_that_do(bundle, device, driver, reason):
    with pytest.raises(RequestError, match=reason):
        device_report(bundle, device, driver)


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="a GPU is here")
def test_this_machines_device_is_asked_of_its_driver(bundle):
    with pytest.raises(HostError, match="CUDA driver library"):
        device_report(bundle, "0", None)


def test_the_same_bytes_from_another_process_folder_and_hash_seed(source, bundle, tmp_path):
    """The other process compiles the kernels itself."""
    output = tmp_path / "another folder" / "tiny.dsmodel"
    output.parent.mkdir()
    env = os.environ | {"PYTHONHASHSEED": "7", "HOME": str(output.parent), "PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, SUPPORT / "compile_for_cuda.py", source, output]
    done = subprocess.run(command, cwd=output.parent, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert output.read_bytes() == bundle.read_bytes()


@pytest.mark.slow
def test_every_architecture_end_to_end_twice(source, tmp_path):
    """The whole command for every architecture; the second compile takes its kernels from the cache."""
    dsc = Path(sys.executable).with_name("dsc")
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    outputs = []
    for name in ("a", "b"):
        output = tmp_path / name / "tiny.dsmodel"
        output.parent.mkdir()
        command = [dsc, "compile", source, "-o", output, "--backend", "cuda,rocm", "--reproducible", "--json"]
        done = subprocess.run(command, env=os.environ | cache, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(output)
    first, second = outputs
    assert first.read_bytes() == second.read_bytes()
    done = subprocess.run([*command, "--force", "--dry-run"], env=os.environ | cache, capture_output=True, check=False)
    assert json.loads(done.stdout)["GPU kernels"]["time about"].startswith("0 s ")
    with open_bundle(first) as opened:
        records = launch_records(opened.manifest.kernels).values()
        assert check_bundle(first)["ok"]
    from dsc.kernels.gpu_targets import ARCHITECTURES

    assert {record.arch for record in records} == set(ARCHITECTURES)
    for record in records:
        if record.resources is not None:
            assert (record.resources.stack, record.resources.local) == (0, 0), (record.variant, record.arch)
        if record.kernel == "dspark_verify_head_tiled":
            assert any(opcode in record.opcodes for opcode in ARCHITECTURES[record.arch].tensor_opcodes)
    for device in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"):
        chosen = device_report(first, device, None)["kernels"].values()
        assert all(f"({device})" in text for text in chosen), (device, chosen)
    old = device_report(first, "sm_100", "12.9")["kernels"].values()
    assert all("(compute_80)" in text for text in old)
    shutil.rmtree(tmp_path / "cache")
