"""A tiny model whose head size has GPU kernels, and compiles of it with a handful of kernels for one architecture.

Run as a script it compiles in a process of its own: ``compile_for_cuda.py SOURCE OUTPUT``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ARCH = "sm_80"
FEW = ("verify_row_stats_argmax", "verify_accept_greedy", "verify_head_tiled_fp16_d64_16x128", "kv_rollback")


def kernel_model_dir(path: Path) -> Path:
    """A tiny Llama with heads of 64 elements."""
    from tiny_models import tiny_llama_dir

    return tiny_llama_dir(path, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64)


def compile_few(source: Path, output: Path, cache: Path, **options: Any) -> None:
    """Compile for CUDA with the kernels of `FEW` only, so that it takes seconds."""
    from dsc.compiler import gpu_kernels
    from dsc.compiler.compile import compile_bundle
    from dsc.compiler.request import build_request

    every = gpu_kernels.variants_for_model

    def few(*arguments: Any, **named: Any) -> Any:
        return tuple(variant for variant in every(*arguments, **named) if variant.name in FEW)

    asked: dict[str, Any] = {
        "target": source,
        "output": output,
        "draft": {"kind": "self", "precision": "int8"},
        "backends": ["cuda"],
        "archs": [ARCH],
        "gate": {"n_prompts": 1, "n_tokens": 8, "n_draws": 0},
        "reproducible": True,
        **options,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_kernels, "variants_for_model", few)
        patch.setattr(gpu_kernels, "default_cache", lambda: cache)
        compile_bundle(build_request(asked))


if __name__ == "__main__":
    compile_few(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[2]).parent / "kernels of this process")
