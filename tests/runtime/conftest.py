"""What tests of the device side share."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "support" / "mock_cuda.c"


@pytest.fixture(scope="session")
def mock_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """File name of a CUDA driver that executes nothing and remembers everything."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc, which builds the mock driver, is not installed")
    path = tmp_path_factory.mktemp("mock") / "libmockcuda.so"
    subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", path, SOURCE], check=True)
    return str(path)
