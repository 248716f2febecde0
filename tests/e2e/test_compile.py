"""Whole compiles of a tiny model: the same bytes from anywhere, nothing lost when killed, weights once."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import onnx
import pytest

from dsc.bundle_schema.container import open_bundle
from dsc.compiler.stages import STAGES
from dsc.passes.stamp_versions import MAX_IR_VERSION, MAX_OPSET

SUPPORT = Path(__file__).resolve().parents[1] / "support"
DSC = Path(sys.executable).with_name("dsc")
QUICK = (("gate", True), ("seal", False))


def compile_elsewhere(source: Path, output: Path, *options: str, umask: int = 0o022, **environment: str) -> Path:
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [DSC, "compile", source, "-o", output, "--reproducible", *options]
    done = subprocess.run(
        command,
        cwd=output.parent,
        env=os.environ | environment,
        umask=umask,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return output


def test_the_same_bytes_from_any_folder_umask_zone_locale_and_hash_seed(tiny_source, tmp_path):
    first = compile_elsewhere(tiny_source, tmp_path / "a" / "model.dsmodel", PYTHONHASHSEED="1", TZ="UTC")
    second = compile_elsewhere(
        tiny_source,
        tmp_path / "another folder" / "model.dsmodel",
        umask=0o077,
        PYTHONHASHSEED="2",
        TZ="Asia/Tokyo",
        LC_ALL="C",
        HOME=str(tmp_path),
    )
    assert first.read_bytes() == second.read_bytes()


def test_compiling_again_over_a_bundle_gives_the_same_bytes_and_leaves_nothing_else(tiny_source, tmp_path):
    from dsc.compiler.compile import compile_bundle
    from dsc.compiler.request import build_request

    before = {path.name: path.read_bytes() for path in tiny_source.iterdir()}
    output = tmp_path / "model.dsmodel"
    output.write_bytes(bytes(9_000_000))
    gate = {"n_prompts": 1, "n_tokens": 8, "n_draws": 0}
    options = {"target": tiny_source, "output": output, "gate": gate, "reproducible": True, "force": True}
    written = set()
    for _ in range(2):
        compile_bundle(build_request(options))
        written.add(output.read_bytes())
        assert [path.name for path in tmp_path.iterdir()] == [output.name]
    assert len(written) == 1
    assert {path.name: path.read_bytes() for path in tiny_source.iterdir()} == before


def test_the_manifest_states_the_versions_that_its_graphs_have(tiny_bundle):
    with open_bundle(tiny_bundle) as bundle:
        needs = bundle.manifest.requires
        graphs = [(entry, onnx.load_model_from_string(bundle.read(entry.member))) for entry in bundle.manifest.graphs()]
    for entry, model in graphs:
        stated = {opset.domain or "ai.onnx": opset.version for opset in model.opset_import}
        assert (entry.ir_version, entry.opsets) == (model.ir_version, stated)
        for function in model.functions:
            for opset in function.opset_import:
                assert opset.version <= needs.opsets[opset.domain or "ai.onnx"]
    assert needs.ir_version == max(model.ir_version for _, model in graphs) <= MAX_IR_VERSION
    assert needs.opsets["ai.onnx"] == max(entry.opsets["ai.onnx"] for entry, _ in graphs) <= MAX_OPSET
    extras = tomllib.loads((SUPPORT.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert needs.min_onnxruntime.startswith(extras["cpu"][0].removeprefix("onnxruntime>="))


def compile_until(stage: str, source: Path, output: Path) -> int:
    """Status of a compile that is killed when `stage` begins; ``none`` is never reached."""
    script = SUPPORT / "compile_and_die.py"
    return subprocess.run([sys.executable, script, source, output, stage], capture_output=True, check=False).returncode


@pytest.mark.parametrize(
    ("stage", "older"),
    [
        pytest.param(stage, older, marks=() if (stage, older) in QUICK else pytest.mark.slow)
        for stage in STAGES
        for older in (False, True)
    ],
)
def test_a_killed_compile_leaves_the_old_file_and_the_next_one_removes_its_rests(tiny_source, tmp_path, stage, older):
    output = tmp_path / "model.dsmodel"
    if older:
        output.write_bytes(b"an older file")
    assert compile_until(stage, tiny_source, output) == -9
    assert output.read_bytes() == b"an older file" if older else not output.exists()
    assert compile_until("none", tiny_source, output) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model.dsmodel"]


def on_a_small_disk(kilobytes: int, *command: object) -> tuple[int, str, str]:
    """Status, what is left and errors of a command in a file system of its own that is mounted at ``$PWD/disk``, with
    an older model.dsmodel on it.
    """
    script = f"""
        mount -t tmpfs -o size={kilobytes}k small disk || exit 77
        echo older > disk/model.dsmodel
        "$@"
        status=$?
        ls -A disk; cat disk/model.dsmodel
        exit $status
    """
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *map(str, command)],
        env=os.environ | {"TMPDIR": "/dev/shm", "MPLCONFIGDIR": "/dev/shm"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("kilobytes", [8, 300, 900])
def test_a_full_disk_keeps_the_old_file_and_leaves_nothing_else(tiny_source, tmp_path, monkeypatch, kilobytes):
    if shutil.which("unshare") is None:
        pytest.skip("no unshare, to mount a file system that is gone afterwards")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    command = (DSC, "compile", tiny_source, "-o", "disk/model.dsmodel", "--force")
    status, left, errors = on_a_small_disk(kilobytes, *command)
    if status in (1, 77) and ("mount" in errors or "unshare" in errors):
        pytest.skip("mounting a file system needs rights that this process does not have")
    assert status == 3, errors
    assert "no room" in errors
    assert left == "model.dsmodel\nolder\n"


def test_a_file_that_may_not_grow_leaves_nothing(tiny_source, tmp_path):
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    done = subprocess.run(
        [DSC, "compile", tiny_source, "-o", tmp_path / "model.dsmodel"],
        preexec_fn=small_files,
        env=os.environ | {"TMPDIR": "/dev/shm", "MPLCONFIGDIR": "/dev/shm"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "no room" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_several_graphs_use_are_stored_once(tiny_bundle):
    with open_bundle(tiny_bundle) as bundle:
        manifest, weights = bundle.manifest, bundle.weights()
        stored = [weight.sha256 for weight in weights]
        assert len(stored) == len(set(stored))
        assert max(len(weight.users) for weight in weights) > 1
        graphs = {graph.member for graph in manifest.graphs() if graph.role.startswith("forward")}
        users = {user.partition(":")[0] for weight in weights for user in weight.users}
        assert users == graphs


def test_no_bundle_is_written_when_the_gate_refuses(tiny_source, tmp_path, monkeypatch):
    from dsc.bundle_schema.errors import CheckFailed
    from dsc.compiler import compile as compiler
    from dsc.compiler.request import build_request

    measured = compiler.run_gate

    def failing(*arguments, **named):
        result = measured(*arguments, **named)
        failed = result.certificate.model_copy(update={"verdict": "fail", "reasons": ("rows differ",)})
        return type(result)(failed, result.costs)

    monkeypatch.setattr(compiler, "run_gate", failing)
    output = tmp_path / "model.dsmodel"
    request = build_request({"target": tiny_source, "output": output})
    with pytest.raises(CheckFailed, match="rows differ"):
        compiler.compile_bundle(request)
    assert list(tmp_path.iterdir()) == []
    lenient = build_request({"target": tiny_source, "output": output, "gate": {"strict": False}})
    assert compiler.compile_bundle(lenient).certificate.verdict == "fail"
    assert output.exists()
