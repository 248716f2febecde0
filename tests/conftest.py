"""Bundles that several test files share, compiled once a session."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with its tokenizer, as a Hugging Face directory."""
    from tiny_models import tiny_llama_dir

    return tiny_llama_dir(tmp_path_factory.mktemp("source") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_bundle(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That model in float32 with an int8 draft made of itself."""
    from dsc.compiler.compile import compile_bundle
    from dsc.compiler.request import build_request

    output = tmp_path_factory.mktemp("bundle") / "tiny.dsmodel"
    draft = {"kind": "self", "precision": "int8"}
    compile_bundle(build_request({"target": tiny_source, "output": output, "draft": draft}))
    return output
