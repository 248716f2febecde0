"""Which kernels a compile asks for: by model, by architecture, refused before any work, or left out with a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from exported_families import exported_family
from launch_records import record
from typer.testing import CliRunner

from dsc.bundle_schema.errors import HostError, KernelError, RequestError
from dsc.compiler import compile as compiler
from dsc.compiler import gpu_kernels
from dsc.compiler.build_graphs import build_graphs
from dsc.compiler.cli import app
from dsc.compiler.gpu_kernels import AttentionNeed, attention_needs, compile_gpu_kernels, needed_variants
from dsc.compiler.request import CompileRequest, build_request
from dsc.kernels.aot import CompiledKernel
from dsc.kernels.gpu_targets import DEFAULT_ARCHITECTURES, architecture, architectures

DSC = Path(sys.executable).with_name("dsc")


def request(**options: object) -> CompileRequest:
    return build_request({"target": Path("model"), "output": Path("bundle"), **options})


def names(targets) -> tuple[str, ...]:
    return tuple(target.name for target in targets)


def test_architectures_follow_the_backends_and_the_recipe_says_which():
    assert names(request().gpu_architectures()) == ()
    assert names(request(backends="cuda").gpu_architectures()) == DEFAULT_ARCHITECTURES
    both = request(backends=["rocm", "cuda"], archs="gfx942, sm_90,sm_90")
    assert names(both.gpu_architectures()) == ("gfx942", "sm_90")
    assert (both.recipe()["backends"], both.recipe()["archs"]) == (["cpu", "cuda", "rocm"], ["gfx942", "sm_90"])
    again = build_request({**request().recipe(), "output": "bundle"})
    assert again.backends == request().backends


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"archs": "sm_90"}, RequestError, "sm_90 needs the backend `cuda`, got cpu"),
        ({"backends": "cuda", "archs": "gfx942"}, RequestError, "gfx942 needs the backend `rocm`, got cpu, cuda"),
        ({"backends": "cuda,rocm", "archs": "sm_90"}, RequestError, "`rocm` needs one of gfx942, gfx950"),
        ({"backends": "cuda", "archs": "sm_80,sm_999"}, KernelError, "'sm_999' is not.*known: sm_80, .*gfx950"),
        ({"backends": "cuda", "archs": ""}, KernelError, "the list of architectures is empty"),
        ({"cuda_attention": "dspark"}, RequestError, "`dspark` needs the backend `cuda`, got cpu"),
        ({"backends": "vulkan"}, RequestError, "'cpu', 'cuda' or 'rocm'"),
    ],
)
def test_what_cannot_be_compiled_for_is_refused_with_what_can(options, kind, reason):
    with pytest.raises(kind, match=reason):
        request(**options)


def test_an_unknown_architecture_ends_the_command_before_any_work(tmp_path):
    command = [
        DSC,
        "compile",
        tmp_path / "nowhere",
        "-o",
        tmp_path / "x.dsmodel",
        "--backend",
        "cuda",
        "--arch",
        "sm_61",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "'sm_61' is not a known GPU architecture (known: sm_80, sm_86, " in done.stderr


def test_a_missing_triton_is_an_error_of_the_environment_before_any_work(tmp_path, monkeypatch):
    def missing() -> str:
        raise HostError("triton", "is not installed", "pip install 'dsc-toolchain[compile]'")

    monkeypatch.setattr("dsc.compiler.request_checks.compiler_version", missing)
    monkeypatch.setattr(compiler, "load_sources", lambda _: pytest.fail("work had begun"))
    asked = build_request({"target": tmp_path, "output": tmp_path / "x.dsmodel", "backends": "cuda"})
    with pytest.raises(HostError, match=r"pip install 'dsc-toolchain\[compile\]'"):
        compiler.compile_bundle(asked)


def test_soft_capped_attention_asks_for_its_own_kernels_before_and_after_lowering():
    exported = exported_family("gemma2")
    built = build_graphs("target", exported, request().weights, request(kernels="ort"))
    for model in (exported.model, built.part.graphs[0].model):
        assert attention_needs([(exported.info, model)]) == (AttentionNeed(16, softcap=True),)
    variants, left_out = needed_variants([AttentionNeed(64, softcap=True)], architecture("sm_90"))
    tiled = [variant for variant in variants if variant.kernel == "dspark_verify_head_tiled"]
    assert {variant.constants["SOFTCAP"] for variant in tiled} == {True}
    assert left_out == {}


def test_two_models_share_what_they_both_need():
    arch = architecture("sm_90")
    one, _ = needed_variants([AttentionNeed(64, softcap=False)], arch)
    other, _ = needed_variants([AttentionNeed(128, softcap=False)], arch)
    both, _ = needed_variants([AttentionNeed(64, softcap=False), AttentionNeed(128, softcap=False)], arch)
    assert len({variant.name for variant in both}) == len(both)
    assert {variant.name for variant in both} == {variant.name for variant in (*one, *other)}


def test_a_head_size_without_kernels_is_left_out_with_the_reason_and_the_verdict_stays(monkeypatch):
    compiled = []

    def compile_nothing(jobs, *, cache, workers):
        compiled.extend(jobs)
        return [CompiledKernel(record(variant=variant.name, arch=arch.name), b"") for variant, arch in jobs]

    monkeypatch.setattr(gpu_kernels, "compile_jobs", compile_nothing)
    made = compile_gpu_kernels([AttentionNeed(16, softcap=False)], architectures("sm_80,sm_90"), workers=1)
    assert made.left_out == {
        "attention and pool kernels, head size 16": "head size 16 has no kernel; known: 64, 80, 96, 128, 256"
    }
    assert {variant.kernel for variant, _ in compiled} == {"dspark_speculative_verify"}
    assert {arch.name for _, arch in compiled} == {"sm_80", "sm_90"}
    assert made.made_by() == {"triton": "3.8.0", "ptxas": "12.9.86"}


def test_nothing_is_compiled_where_no_gpu_is_asked_for(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "compile_jobs", lambda *_, **__: pytest.fail("compiled"))
    assert compile_gpu_kernels([AttentionNeed(64, softcap=False)], (), workers=1).kernels == ()


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    from dsc.kernels.aot import compile_jobs
    from dsc.kernels.verify_table import greedy_variant

    blocked = tmp_path / "a file"
    blocked.write_text("")
    variant = replace(greedy_variant(), name="any")
    with pytest.raises(HostError, match="a file: compiled kernels cannot be kept there"):
        compile_jobs([(variant, architecture("sm_80"))], cache=blocked, workers=1)


def test_the_cache_key_covers_what_a_variant_serves():
    from dsc.kernels.aot import content_key
    from dsc.kernels.verify_table import greedy_variant

    variant, arch = greedy_variant(), architecture("sm_80")
    changed = [replace(variant, at_most={"vocab": 7}), replace(variant, equals={}), replace(variant, grid=((), (), ()))]
    assert len({content_key(each, arch) for each in (variant, *changed)}) == 4


def test_a_dry_run_counts_kernels_and_says_what_is_left_out(tiny_source, tmp_path):
    output = tmp_path / "x.dsmodel"
    command = ["compile", str(tiny_source), "-o", str(output), "--dry-run", "--json"]
    done = CliRunner().invoke(app, [*command, "--backend", "cuda", "--arch", "sm_80,sm_90", "--threads", "3"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["GPU kernels"]["kernels"].startswith("34 for sm_80, sm_90, ")
    assert found["GPU kernels"]["no attention and pool kernels, head size 16"].startswith("head size 16 has no kernel")
    assert found["GPU kernels"]["time about"].endswith("with 3 processes")
    plain = json.loads(CliRunner().invoke(app, command).stdout)
    assert "GPU kernels" not in plain
    assert not output.exists()
