"""Bundles that several test files share, compiled once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no failure: times are for benchmarks.
settings.register_profile("dsc", deadline=None)
settings.load_profile("dsc")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests that need a GPU; without one the run ends")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu"):
        _require_gpu()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--gpu"):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: make test-gpu"))


def _require_gpu() -> None:
    """End the run with one reason, rather than every test with the same."""
    from dsc.bundle_schema.errors import HostError
    from dsc.compiler.kernel_bench import require_gpu

    try:
        require_gpu("pytest --gpu")
    except HostError as error:
        raise pytest.UsageError(str(error)) from None


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
