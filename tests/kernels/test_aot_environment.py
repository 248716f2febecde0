"""Kernels are those of the variant, the architecture and the tools, whatever the environment says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is an extra of the compiler")

from dsc.kernels.aot import compile_kernel
from dsc.kernels.gpu_targets import architecture
from dsc.kernels.verify_table import greedy_variant, walk_variants

# Variables by which Triton and LLVM make other code, and one of the assembler.
LEAKS = {
    "TRITON_DEFAULT_FP_FUSION": "0",
    "TRITON_DISABLE_LINE_INFO": "0",
    "TRITON_F32_DEFAULT": "ieee",
    "TRITON_MOCK_PTX_VERSION": "7.4",
    "TRITON_OVERRIDE_ARCH": "sm90",
    "TRITON_PTXAS_PATH": "/bin/false",
    "PTXAS_OPTIONS": "--opt-level 1",
    "DISABLE_PTXAS_OPT": "1",
    "DISABLE_LLVM_OPT": "1",
}


def test_the_environment_changes_no_byte_and_is_left_as_it_was():
    variants = {"greedy": "verify_table.greedy_variant()", "walk": "verify_table.walk_variants()[0]"}
    script = (
        "import os, sys\n"
        "from dsc.kernels import aot, verify_table\n"
        "from dsc.kernels.gpu_targets import architecture\n"
        "before = dict(os.environ)\n"
        "for arch in ('sm_80', 'compute_80'):\n"
        f"    for variant in ({', '.join(variants.values())}):\n"
        "        print(aot.compile_kernel(variant, architecture(arch)).record.sha256)\n"
        "assert dict(os.environ) == before\n"
    )
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | LEAKS)
    assert done.returncode == 0, done.stderr
    wanted = [
        compile_kernel(variant, architecture(arch)).record.sha256
        for arch in ("sm_80", "compute_80")
        for variant in (greedy_variant(), walk_variants()[0])
    ]
    assert done.stdout.split() == wanted
