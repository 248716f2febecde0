"""Ahead-of-time compilation on a machine without a GPU."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is an extra of the compiler")

from dsc.bundle_schema.errors import KernelError
from dsc.kernels import sass
from dsc.kernels.aot import CompiledKernel, compile_kernel, compile_kernels, content_key
from dsc.kernels.attention_table import tiled_variant
from dsc.kernels.gpu_targets import ARCHITECTURES, DEFAULT_ARCHITECTURES, architecture, architectures
from dsc.kernels.kernel_table import KERNELS, all_variants, variants_for_model
from dsc.kernels.launch_record import LaunchRecord
from dsc.kernels.verify_table import greedy_variant, stats_variant, walk_variants

# PTX parameter types of the run-time argument types.
PTX = {"i32": "u32", "u32": "u32", "i64": "u64", "fp32": "f32"}


def assert_sound(kernel: CompiledKernel, uses_tensor_cores: bool) -> None:
    """No spills, no local memory, fits the architecture, matrix units where they are promised."""
    made, target = kernel.record, ARCHITECTURES[kernel.record.arch]
    if made.resources is not None:
        assert (made.resources.stack, made.resources.local) == (0, 0), made.variant
        assert "LDL" not in made.opcodes
        assert made.resources.registers * made.threads <= target.registers_per_multiprocessor
    assert not {"scratch_load", "scratch_store"} & made.opcodes.keys(), made.variant  # AMD's spills
    assert made.shared <= target.shared_per_block
    assert made.global_scratch_size == 0
    assert made.num_ctas == 1
    if uses_tensor_cores:
        assert any(opcode in made.opcodes for opcode in target.tensor_opcodes), (made.variant, made.opcodes)


SMALL = [
    ("sm_80", 16, 64, False),
    ("sm_90", 64, 128, False),
    ("sm_100", 64, 128, False),
    ("sm_120", 16, 256, False),
    ("compute_80", 16, 128, True),
]


@pytest.mark.parametrize(("arch", "rows", "head_size", "quantised"), SMALL)
def test_attention_uses_the_matrix_units_and_does_not_spill(arch, rows, head_size, quantised):
    target = architecture(arch)
    kernel = compile_kernel(tiled_variant(head_size, "bfloat16", rows, target, quantised=quantised), target)
    assert_sound(kernel, uses_tensor_cores=True)
    own = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}.get(arch)
    assert own is None or kernel.record.opcodes[own] > 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_declared_variant_is_sound(arch, tmp_path):
    variants = all_variants(arch)
    for variant, kernel in zip(variants, compile_kernels(variants, arch), strict=True):
        assert_sound(kernel, variant.uses_tensor_cores)


def test_the_record_says_how_to_launch_and_survives_json():
    made = compile_kernel(stats_variant(sums=True), architecture("sm_90")).record
    assert LaunchRecord.model_validate_json(made.model_dump_json()) == made
    assert (made.threads, made.entry, made.image) == (256, "row_stats", "cubin")
    assert (made.line_info, made.fp_fusion, made.ptx_version, made.minimum_driver) == (False, True, "8.8", 12000)
    assert made.blocks({"batch": 3, "rows": 5, "parts": 7}) == (15, 7, 1)
    with pytest.raises(KernelError, match="needs the size of axis 'parts'"):
        made.blocks({"batch": 3, "rows": 5})


@pytest.mark.parametrize("variant", [greedy_variant(), walk_variants()[1]], ids=lambda v: v.name)
def test_ptx_parameters_are_the_arguments_and_two_scratch_pointers(variant):
    kernel = compile_kernel(variant, architecture("compute_80"))
    text = kernel.code.decode()
    entry = text[text.index(".entry") : text.index("{", text.index(".entry"))]
    found = re.findall(r"\.param \.(\w+)", entry)
    assert found == [
        "u64" if arg.is_pointer else PTX[arg.type] for arg in kernel.record.args
    ] + ["u64", "u64"]  # fmt: skip
    assert f".reqntid {kernel.record.threads}" in entry
    assert (kernel.record.ptx_version, kernel.record.minimum_driver) == ("8.0", 12000)


def test_same_bytes_from_another_folder_process_and_hash_seed(tmp_path):
    """The kernel's module is copied elsewhere; nothing of either path may reach the image."""
    variant = walk_variants()[0]
    here = compile_kernel(variant, architecture("sm_80"))
    root = Path(sys.modules["dsc.kernels.aot"].__file__ or "").parents[1]
    package = tmp_path / "a folder" / "dsc"
    for name in ("kernels", "bundle_schema"):
        shutil.copytree(root / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    moved = package / "kernels" / "markov_walk_triton.py"
    moved.write_text(moved.read_text().replace("import triton\n", "# two more\n# lines\nimport triton\n", 1))
    script = tmp_path / "compile_it.py"
    script.write_text(
        "import sys, hashlib; sys.path.insert(0, sys.argv[1])\n"
        "import dsc.kernels.aot as aot\n"
        "from dsc.kernels.gpu_targets import architecture\n"
        "from dsc.kernels.verify_table import walk_variants\n"
        "assert aot.__file__.startswith(sys.argv[1])\n"
        "print(hashlib.sha256(aot.compile_kernel(walk_variants()[0], architecture('sm_80')).code).hexdigest())\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-S", "-c", _WITHOUT_EDITABLE_HOOK, str(script), str(package.parent)],
        capture_output=True, text=True, check=False, env={"PYTHONHASHSEED": "7", "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.strip() == hashlib.sha256(here.code).hexdigest(), done.stderr
    assert here.record.sha256 == done.stdout.strip()
    assert str(root).encode() not in here.code


# Installed packages without the .pth file that maps dsc to this checkout.
_WITHOUT_EDITABLE_HOOK = f"""
import runpy, sys
sys.path.append({str(Path(pytest.__file__).parents[1])!r})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_results_come_in_order_from_two_processes_and_then_from_the_cache(tmp_path, monkeypatch):
    variants = walk_variants()
    first = compile_kernels(variants, "sm_86,sm_90", cache=tmp_path, workers=2)
    assert [(k.record.arch, k.record.variant) for k in first] == [
        (arch, variant.name) for arch in ("sm_86", "sm_90") for variant in variants
    ]
    monkeypatch.setattr("dsc.kernels.aot.compile_kernel", lambda *_: pytest.fail("not from the cache"))
    monkeypatch.setattr("dsc.kernels.aot._compile_in_process", lambda *_: pytest.fail("not from the cache"))
    assert compile_kernels(variants, "sm_86,sm_90", cache=tmp_path) == first


def test_a_damaged_cache_entry_is_built_again(tmp_path):
    variant, target = walk_variants()[0], architecture("sm_80")
    (first,) = compile_kernels([variant], "sm_80", cache=tmp_path)
    code = tmp_path / content_key(variant, target) / "code"
    code.write_bytes(code.read_bytes()[:-1])
    (again,) = compile_kernels([variant], "sm_80", cache=tmp_path)
    assert again == first
    assert code.read_bytes() == first.code


def test_the_cache_key_follows_configuration_and_architecture():
    target = architecture("sm_80")
    keys = {content_key(variant, target) for variant in all_variants("sm_80")}
    assert len(keys) == len(all_variants("sm_80"))
    assert content_key(greedy_variant(), architecture("sm_86")) not in keys


@pytest.mark.parametrize("name", ["sm_999", "sm_61", "SM_80", "sm_80,sm_70", ""])
def test_an_unknown_architecture_is_refused_with_the_known_ones_before_any_work(name, monkeypatch):
    monkeypatch.setattr("dsc.kernels.aot.compiler_version", lambda: pytest.fail("work had begun"))
    with pytest.raises(KernelError, match="sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, compute_80, gfx942, gfx950"):
        compile_kernels([greedy_variant()], name)


def test_a_kernel_that_does_not_compile_is_an_error_with_the_compilers_message(tmp_path):
    from dataclasses import replace

    broken = replace(walk_variants()[0], name="broken", constants={"BLOCK_K": 33, "SAMPLED": False})
    for workers in (1, 2):
        with pytest.raises(KernelError, match=r"broken: does not compile for sm_80[\s\S]*power of 2"):
            compile_kernels([broken, broken], "sm_80", workers=workers)


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx950", marks=pytest.mark.slow)])
def test_amd_code_objects_come_by_the_same_path(arch):
    target = architecture(arch)
    kernel = compile_kernel(tiled_variant(64, "float16", 64, target), target)
    assert_sound(kernel, uses_tensor_cores=True)
    assert kernel.code[:4] == b"\x7fELF"
    assert (kernel.record.threads, kernel.record.image) == (512, "hsaco")


def test_opcode_counts_agree_with_the_disassembler_text():
    kernel = compile_kernel(greedy_variant(), architecture("sm_80"))
    counts = sass.opcodes(kernel.code)
    assert counts["EXIT"] >= 1
    assert counts["STG"] == 3


def test_the_table_is_consistent():
    for arch in ARCHITECTURES:
        variants = all_variants(arch)
        assert len({variant.name for variant in variants}) == len(variants)
        assert {variant.kernel for variant in variants} == set(KERNELS)
    assert architectures(DEFAULT_ARCHITECTURES)[0].name == "sm_80"
    chosen = variants_for_model((128, 64), "bfloat16", architecture("sm_90"), softcap=True)
    assert {variant.constants.get("SOFTCAP") for variant in chosen if "head_tiled" in variant.name} == {True}


@pytest.mark.parametrize(
    ("size", "dtype", "reason"), [(72, "float16", "head size 72"), (64, "float32", "rows of float32")]
)
def test_a_model_without_kernels_is_refused_with_what_exists(size, dtype, reason):
    with pytest.raises(KernelError, match=reason):
        variants_for_model((size,), dtype, architecture("sm_80"))
