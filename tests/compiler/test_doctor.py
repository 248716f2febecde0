"""What the doctor says of installations that are not as they should be."""

import json

import pytest

from dsc.bundle_schema.errors import HostError
from dsc.compiler import doctor
from dsc.compiler.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of installed packages, before those of this environment."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(folder, name, version):
    """The metadata of a wheel, as an installer leaves it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize("other", ["onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml"])
def test_two_wheels_of_onnxruntime_are_both_named(folder, other, monkeypatch, capsys):
    install(folder, other, "1.22.0")
    monkeypatch.setattr("sys.argv", ["dsc", "doctor", "--json"])
    with pytest.raises(SystemExit) as exit_status:
        main()
    assert exit_status.value.code == HostError.exit_code
    out = capsys.readouterr().out
    report, _ = json.JSONDecoder().raw_decode(out)
    (problem,) = report["problems"]
    assert f"onnxruntime and {other} are installed together" in problem
    assert report["fields"][other] == "1.22.0"
    assert report["fields"]["can run bundles"] is False


def test_no_onnxruntime_and_no_compile_packages_say_what_to_install(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    report = doctor.examine()
    assert "dsc-toolchain[cpu]" in report["problems"][0]
    assert "torch, transformers" in report["fields"]["can compile"]
    with pytest.raises(HostError, match="needs torch, transformers"):
        doctor.require_compile_packages()


def test_this_installation_is_sound():
    report = doctor.examine()
    assert report["problems"] == []
    assert report["fields"]["can run bundles"] is True


def test_a_wheel_that_is_not_listed_is_known_by_the_package_that_it_brings(folder):
    install(folder, "onnxruntime-next", "9.9")
    (folder / "onnxruntime_next-9.9.dist-info" / "top_level.txt").write_text("onnxruntime\n")
    install(folder, "onnxruntime-extensions", "0.14")
    (folder / "onnxruntime_extensions-0.14.dist-info" / "top_level.txt").write_text("onnxruntime_extensions\n")
    report = doctor.examine()
    (problem,) = report["problems"]
    assert "onnxruntime and onnxruntime-next are installed together" in problem
    assert report["fields"]["onnxruntime-next"] == "9.9"
    assert "onnxruntime-extensions" not in report["fields"]
