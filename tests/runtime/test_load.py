"""What a bundle needs is checked before anything runs, and what was asked for is what happens."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress

import numpy as np
import onnx
import pytest
from packed_bundle import packed_bundle
from scripted_lm import greedy_reference, scripted_lm
from toy_bundle import toy_bundle, toy_info, write_bundle

from dsc.bundle_schema.bundle_errors import ChecksumMismatch, ForeignLocation, UnsupportedSchema
from dsc.bundle_schema.certificate import Certificate
from dsc.bundle_schema.container import open_bundle, rewrite_members
from dsc.bundle_schema.dflash_config import DflashConfig, Proposer
from dsc.bundle_schema.errors import CheckFailed, DscError, HostError, RequestError
from dsc.runtime import load
from dsc.runtime.verified_files import cache_folder

TABLE = np.random.default_rng(2).normal(size=(20, 20)).astype(np.float32)
EXPECTED = greedy_reference(TABLE, [1], 10)


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path):
    return toy_bundle(tmp_path / "toy.dsmodel", TABLE)


def flip_a_byte(path, member):
    with open_bundle(path) as bundle:
        offset = bundle.member(member).offset
    status = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(offset)
        first = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([first ^ 1]))
    return status


def test_a_bundle_that_needs_a_newer_onnxruntime_is_refused_in_one_line(tmp_path, monkeypatch):
    path = toy_bundle(tmp_path / "toy.dsmodel", TABLE, min_onnxruntime="99.0")
    monkeypatch.setattr("dsc.runtime.placer.create_session", lambda *_: pytest.fail("a session was made before"))
    with pytest.raises(HostError, match=r"onnxruntime 99\.0 or newer is required, got 1\.") as error:
        load(path)
    assert "\n" not in str(error.value)


JSON_MEMBERS = ["certificate.json", "dflash_config.json", "kv_plan.json"]


def with_schema(path, member, version, **more):
    with open_bundle(path) as bundle:
        content = json.loads(bundle.read(member)) | {"schema_version": version} | more
    rewrite_members(path, {member: json.dumps(content).encode()})


@pytest.mark.parametrize("member", JSON_MEMBERS)
@pytest.mark.parametrize(("version", "hint"), [("2.0", "upgrade dsc"), ("0.9", "compile the model again")])
def test_a_member_of_another_major_says_what_to_do(path, member, version, hint):
    with_schema(path, member, version, created_by={"dsc": "7.5.3"}, future=[1])
    with pytest.raises(UnsupportedSchema) as refusal:
        load(path)
    wanted = f"{member}: written by dsc 7.5.3 with schema {version}, this dsc reads schema 1.x ({hint}"
    assert wanted in str(refusal.value)


@pytest.mark.parametrize("member", JSON_MEMBERS)
def test_a_member_of_a_newer_minor_is_read_as_far_as_it_is_known(path, member):
    with_schema(path, member, "1.99", addition={"deep": [1, 2]})
    assert list(load(path).generate([1], 10).ids) == EXPECTED


@pytest.mark.parametrize("location", ["/etc/passwd", "../secret.bin", "secret.bin"])
def test_weights_outside_the_bundle_are_refused_with_the_tensor_s_name(path, location):
    secret = path.parent / "secret.bin"
    secret.write_bytes(bytes(1 << 16))
    with open_bundle(path) as bundle:
        model = onnx.load_model_from_string(bundle.read("target/graph.onnx"))
    table = next(tensor for tensor in model.graph.initializer if tensor.name == "table")
    next(entry for entry in table.external_data if entry.key == "location").value = location
    rewrite_members(path, {"target/graph.onnx": model.SerializeToString()})
    with pytest.raises(ForeignLocation, match=r"target/graph\.onnx: tensor 'table'"):
        load(path)


def test_weights_are_found_under_any_name_folder_and_link(path, tmp_path):
    blob = tmp_path / "blobs" / "3f786850e387550fdab836ed7e6dc881de23001b"
    blob.parent.mkdir()
    shutil.copy(path, blob)
    link = tmp_path / "snapshot" / "model.dsmodel"
    link.parent.mkdir()
    link.symlink_to(os.path.relpath(blob, link.parent))
    for place in (path, blob, link):
        assert list(load(place).generate([1], 10).ids) == EXPECTED


def test_loading_works_from_another_folder(path, monkeypatch):
    monkeypatch.chdir("/")
    assert list(load(path).generate([1], 10).ids) == EXPECTED
    monkeypatch.chdir(path.parent)
    assert list(load(path.name).generate([1], 10).ids) == EXPECTED


def test_verification_once_remembers_the_file_until_it_changes(path):
    load(path)
    assert len(list(cache_folder().iterdir())) == 1
    status = flip_a_byte(path, "target/graph.onnx")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(ChecksumMismatch, match=r"target/graph\.onnx"):
        load(path)


def test_verification_always_and_never(path):
    flip_a_byte(path, "certificate.json")
    with pytest.raises(ChecksumMismatch, match=r"certificate\.json"):
        load(path, verify="always")
    with pytest.raises(RequestError, match="'always', 'once' or 'never' is required, got 'sometimes'"):
        load(path, verify="sometimes")


def test_a_cache_folder_that_cannot_be_written_is_no_error(path, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert list(load(path).generate([1], 10).ids) == EXPECTED


def test_an_unknown_or_absent_provider_is_refused(path):
    with pytest.raises(RequestError, match="one of cpu, cuda is required, got 'tpu'"):
        load(path, provider="tpu")
    with pytest.raises(HostError, match="CUDAExecutionProvider is required"):
        load(path, provider="cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads: at least 1 is required, got 0"),
        ({"threads": -1}, "threads: at least 1 is required, got -1"),
        ({"threads": 2**31}, "threads: at most 1024 is allowed, got 2147483648"),
        ({"threads": 1.5}, r"threads: a whole number is required, got 1\.5"),
        ({"threads": "2"}, "threads: a whole number is required, got '2'"),
        ({"max_length": 1}, "max_length: at least 2 is required, got 1"),
        ({"max_length": 12.5}, r"max_length: a whole number is required, got 12\.5"),
        ({"max_length": float("nan")}, "max_length: a whole number is required, got nan"),
        ({"provider": None}, "provider: one of cpu, cuda is required, got None"),
        ({"provider": ["cpu"]}, r"provider: one of cpu, cuda is required, got \['cpu'\]"),
        ({"kernels": "fast"}, "kernels: 'auto', 'native' or 'ort' is required, got 'fast'"),
        ({"verify": True}, "verify: 'always', 'once' or 'never' is required, got True"),
        ({"strict": "no"}, "strict: True or False is required, got 'no'"),
        ({"certified": 1}, "certified: True or False is required, got 1"),
        ({"override": 5}, "override: a path is required, got 5"),
    ],
)
def test_a_wrong_argument_is_named(path, options, message):
    with pytest.raises(RequestError, match=message):
        load(path, **options)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (None, "path: a path is required, got None"),
        (5, "path: a path is required, got 5"),
        (b"toy", "path: a path is required, got b'toy'"),
        ("a\0b", "cannot be opened: embedded null"),
        ("x" * 5000, "cannot be opened: File name too long"),
        ("", "a .dsmodel file is required, got something else"),
        ("/dev/null", "a .dsmodel file is required, got something else"),
    ],
    ids=["none", "number", "bytes", "zero", "long", "empty", "device"],
)
def test_what_is_no_path_of_a_bundle_is_refused(place, message):
    with pytest.raises(RequestError, match=message):
        load(place)


def test_places_with_any_characters(path, tmp_path, monkeypatch):
    """Spaces, other scripts, quotes, `..`, a read-only folder, links to files and folders."""
    for name in ("with space", "ünï-日本", "quo'te\"s", "percent%20 #?&", "-dash", "x" * 200):
        folder = tmp_path / name
        folder.mkdir()
        copy = shutil.copy(path, folder / f"{name}.dsmodel")
        assert list(load(copy).generate([1], 10).ids) == EXPECTED
        assert list(load(folder / ".." / name / copy.name).generate([1], 10).ids) == EXPECTED
    (tmp_path / "linked").symlink_to(tmp_path / "with space", target_is_directory=True)
    folder.chmod(0o500)
    copy.chmod(0o400)
    monkeypatch.chdir(tmp_path)
    assert list(load("linked/../with space/with space.dsmodel").generate([1], 10).ids) == EXPECTED
    assert list(load("linked/with space.dsmodel").generate([1], 10).ids) == EXPECTED
    assert list(load(copy).generate([1], 10).ids) == EXPECTED
    folder.chmod(0o700)


def test_a_loaded_bundle_outlives_its_replacement_and_its_removal(path, tmp_path):
    """An update writes a new file and moves it over the old one, as the compiler does."""
    model = load(path)
    other = np.roll(TABLE, 1, axis=1)
    os.replace(toy_bundle(tmp_path / "new.dsmodel", other), path)
    assert list(model.generate([1], 10).ids) == EXPECTED
    assert list(load(path).generate([1], 10).ids) == greedy_reference(other, [1], 10)
    path.unlink()
    assert list(model.generate([1], 10).ids) == EXPECTED


@pytest.mark.parametrize("member", ["certificate.json", "dflash_config.json", "kv_plan.json", "target/graph.onnx"])
def test_damage_that_nobody_verifies_is_refused_or_harmless(path, member, capfd):
    """`never` skips the hashes; what is parsed is still checked, and nothing but dsc's own errors comes out."""
    with open_bundle(path) as bundle:
        found = bundle.member(member)
    sound = path.read_bytes()
    for step in range(40):
        data = bytearray(sound)
        data[found.offset + step * found.nbytes // 40] ^= 0xFF
        path.write_bytes(data)
        with suppress(DscError):
            load(path, verify="never").generate([1], 10)
        with pytest.raises(ChecksumMismatch, match=re.escape(member)):
            load(path, verify="once")
    assert capfd.readouterr().out == ""


def test_threads_follow_the_allowed_cpus_without_complaint(path):
    script = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from dsc.runtime import load\n"
        f"model = load({str(path)!r}, verify='never')\n"
        "print(model.bundle.settings.threads, *model.generate([1], 10).ids)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", *map(str, EXPECTED)]
    assert done.stderr == ""


def test_a_certificate_that_did_not_pass_is_shown_and_can_be_refused(tmp_path):
    certificate = Certificate(verdict="not_strict", reasons=("2 sequences differ",), device="toy")
    path = toy_bundle(tmp_path / "toy.dsmodel", TABLE, certificate=certificate)
    assert load(path).generate([1], 5).stats.certificate == "not_strict"
    with pytest.raises(CheckFailed, match=r"got 'not_strict' \(2 sequences differ\)"):
        load(path, certified=True)


def test_a_draft_that_cannot_be_loaded_is_an_error_or_is_reported(tmp_path):
    draft = scripted_lm(TABLE)
    draft.graph.node[0].op_type = "NoSuchOperator"
    path = write_bundle(
        tmp_path / "toy.dsmodel",
        scripted_lm(TABLE),
        toy_info(20),
        draft=draft,
        draft_info=toy_info(20),
        draft_kind="model",
    )
    with pytest.raises(HostError, match=r"draft/graph\.onnx: onnxruntime .* refused the graph"):
        load(path)
    result = load(path, strict=False).generate([1], 10)
    assert list(result.ids) == EXPECTED
    assert result.stats.speculation == "off"
    assert "draft/graph.onnx" in result.stats.speculation_reason


def test_a_bundle_without_a_draft_says_so(tmp_path):
    path = toy_bundle(tmp_path / "toy.dsmodel", TABLE, draft_kind="none")
    stats = load(path).generate([1], 10).stats
    assert (stats.speculation, stats.speculation_reason) == ("off", "the bundle offers no draft of kind 'none'")


def test_a_bundle_without_a_draft_looks_nothing_up_unless_it_is_told_to(tmp_path):
    config = DflashConfig(policy="calibrated")
    model = load(toy_bundle(tmp_path / "toy.dsmodel", TABLE, draft_kind="none", config=config))
    assert model.proposers == ()
    assert model.generate([1], 10).stats.speculation == "off"
    model.update_config({"proposers.ngram.enabled": True})
    assert model.proposers == ("ngram",)
    assert model.generate([1], 10).stats.speculation == "ngram"


def test_a_disabled_proposer_is_not_used(tmp_path):
    config = DflashConfig(proposers={"ngram": Proposer(enabled=False)})
    model = load(toy_bundle(tmp_path / "toy.dsmodel", TABLE, config=config))
    assert model.proposers == ()
    assert model.generate([1], 10).stats.speculation == "off"


def test_a_graph_input_that_nothing_feeds_is_named(tmp_path):
    model = scripted_lm(TABLE)
    model.graph.input[0].name = "tokens"
    model.graph.node[2].input[0] = "tokens"
    path = write_bundle(tmp_path / "toy.dsmodel", model, toy_info(20))
    with pytest.raises(Exception, match=r"target/graph\.onnx: graph input 'tokens' is neither"):
        load(path)


def test_a_short_window_limits_the_proposer_by_the_configuration(tmp_path):
    config = DflashConfig(proposers={"self": Proposer(max_window=2, max_context=9)})
    path = toy_bundle(tmp_path / "toy.dsmodel", TABLE, TABLE, draft_kind="self", config=config)
    stats = load(path).generate([1], 40).stats
    assert max(stats.windows) == 2
    assert stats.fallbacks["context too long"] > 20


def test_a_graph_that_the_library_lacks_an_operator_of_runs_without_it_and_says_so(tmp_path, monkeypatch):
    path = packed_bundle(tmp_path / "packed.dsmodel")
    monkeypatch.setattr("dsc.kernels.native.OPERATORS", frozenset({"QkvAttention", "SwiGlu"}))
    reason = "the bundle's graph has DenseMatMul, which the native library of this version lacks"
    stats = load(path).generate([1, 2, 3], 4, ignore_eos=True).stats
    assert stats.kernels == "ort"
    assert reason in stats.kernels_reason
    with pytest.raises(HostError, match=f"kernels: .*{reason} .compile it again"):
        load(path, kernels="native")
