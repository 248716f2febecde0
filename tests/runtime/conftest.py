"""What several files share: a driver that executes nothing, and a scripted model."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from scripted_text import OPTIONS, TARGET
from stub_cuda.build import PROVIDER, build_stubs
from toy_bundle import toy_bundle

from dsc.runtime import load

SOURCE = Path(__file__).parents[1] / "support" / "mock_cuda.c"


@pytest.fixture(scope="session")
def mock_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """File name of a CUDA driver that executes nothing and remembers everything."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc, which builds the mock driver, is not installed")
    path = tmp_path_factory.mktemp("mock") / "libmockcuda.so"
    subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", path, SOURCE], check=True)
    return str(path)


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of stub CUDA libraries for onnxruntime's CUDA provider."""
    return build_stubs(PROVIDER, tmp_path_factory.mktemp("stubs"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model of `scripted_text`; a file with another one defines this fixture itself."""
    path = tmp_path_factory.mktemp("toy") / "toy.dsmodel"
    return load(toy_bundle(path, TARGET, TARGET, draft_kind="self"), verify="never")


@pytest.fixture(params=OPTIONS, ids=["off", "auto", "self", "ngram"])
def speculation(request):
    """Ways of drafting for it."""
    return request.param
