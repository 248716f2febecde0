"""The project as a package: what is declared is there, what is public is named, what is documented exists."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PACKAGES = ("bundle_schema", "compiler", "kernels", "passes", "runtime")
DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def test_the_packages_on_disk_are_the_ones_that_are_built():
    declared = {name.removeprefix("dsc.") for name in PYPROJECT["tool"]["setuptools"]["packages"]}
    on_disk = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")}
    assert declared == on_disk == set(PACKAGES)
    nested = [path for package in PACKAGES for path in (REPOSITORY / package).glob("*/**/__init__.py")]
    assert nested == []


def test_data_files_are_packaged():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["*"]
    for package in PACKAGES:
        for path in (REPOSITORY / package).iterdir():
            if path.suffix in {".py", ".so", ""} or path.name == "__pycache__":
                continue
            assert any(path.match(pattern) for pattern in patterns), path


def test_every_module_can_be_imported_or_is_triton():
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).glob("*.py")):
            if not path.stem.endswith("_triton"):
                import_module(f"dsc.{package}.{path.stem}")


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_there(package):
    module = import_module(f"dsc.{package}")
    for name in getattr(module, "__all__", ()):
        assert hasattr(module, name)


def test_the_runtime_has_its_public_api():
    runtime = import_module("dsc.runtime")
    assert {"load", "SpeculativeModel", "SamplingParams", "GenerationResult", "GenerationStats"} <= set(runtime.__all__)


def test_running_a_bundle_imports_nothing_of_the_compiler():
    code = "import sys, dsc.runtime; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "transformers", "onnx", "onnx_ir", "onnxscript", "triton", "gguf"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_in_the_documentation_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_command_line_reference_is_up_to_date():
    typer = Path(sys.executable).with_name("typer")
    command = [typer, "dsc.compiler.cli", "utils", "docs", "--name", "dsc"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    written = (REPOSITORY / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert written.strip() == done.stdout.strip(), "run `make cli-docs`"


def test_no_wheel_of_onnxruntime_is_forced_and_none_comes_twice():
    """All of them install into one folder: which one is the user's choice, by an extra."""
    project = PYPROJECT["project"]

    def wheels(requirements):
        names = [re.split(r"[\s\[<>=~!;]", line)[0] for line in requirements]
        return [name for name in names if name.startswith(("onnxruntime", "ort-"))]

    assert wheels(project["dependencies"]) == []
    found = {extra: wheels(lines) for extra, lines in project["optional-dependencies"].items()}
    assert {extra: names for extra, names in found.items() if names} == {
        "cpu": ["onnxruntime"],
        "cuda": ["onnxruntime-gpu"],
    }
