"""Wrong command lines: an error of one line that names the option, the documented exit code, and nothing written."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DSC = Path(sys.executable).with_name("dsc")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "dsc: No such command 'nonsense'"),
        (["run"], "dsc run: Missing argument"),
        (["inspect", "x", "--nonsense"], "dsc inspect: No such option: --nonsense"),
        (["compile", "--slots"], "dsc: Option '--slots' requires an argument"),
        (["compile", "--window", "two"], "dsc compile: Invalid value for '--window'"),
        (["plan", "x", "--memory", "much"], "dsc plan: Invalid value for '--memory'"),
        (["run", "x", "--kernels", "fast"], "dsc run: Invalid value for '--kernels'"),
        (["simulate", "x"], "dsc simulate: Missing option '--trace'"),
        (["check", "x", "y"], "dsc check: Got unexpected extra argument"),
        (["kernels", "bench", "--repeats", "2"], "dsc kernels bench: Invalid value for '--repeats'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_parser_refuses_is_an_error_like_any_other(dsc, refused, arguments, message):
    line = refused(*arguments)
    assert message in line
    command = message.partition(":")[0]
    assert f"(see `{command} --help`)" in line
    status, out, _ = dsc(*arguments, "--json")
    assert status == 2
    if "requires an argument" not in message:  # there `--json` is taken for the argument
        assert json.loads(out)["error"]["where"] == command


def test_without_a_command_there_is_help_and_an_exit_code_that_scripts_notice(dsc):
    status, out, err = dsc()
    assert status == 2
    assert "compile" in out + err
    assert dsc("--help")[0] == dsc("run", "--help")[0] == 0


NO_BUNDLES = {
    "nothing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "empty": lambda path: path.touch(),
    "text": lambda path: path.write_text("hello"),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 20),
    "a pipe": os.mkfifo,
}
COMMANDS = [
    ["inspect"],
    ["check"],
    ["plan"],
    ["set", "policy=fixed"],
    ["kernels", "list"],
    ["run", "-p", "x"],
    ["bench"],
    ["inspect", "--graph", "target"],
    ["inspect", "--device", "sm_90"],
]


@pytest.mark.parametrize("content", NO_BUNDLES)
def test_what_is_no_bundle_is_named_by_every_command(refused, dsc, tmp_path, content):
    path = tmp_path / "x.dsmodel"
    NO_BUNDLES[content](path)
    before = list(tmp_path.iterdir())
    for command in COMMANDS:
        name, *options = command
        arguments = ["kernels", "list", path] if name == "kernels" else [name, path, *options]
        assert str(path) in refused(*arguments)
        assert json.loads(dsc(*arguments, "--json")[1])["error"]["where"] == str(path)
    assert str(path) in refused("diff", path, path)
    assert list(tmp_path.iterdir()) == before


def test_a_name_that_no_file_has_is_refused(refused, tiny_source):
    long = "x" * 5000
    for command in COMMANDS[:4]:
        assert "File name too long" in refused(command[0], long, *command[1:])
    assert "at most 254 bytes" in refused("compile", tiny_source, "-o", long)
    assert "File name too long" in refused("compile", tiny_source, "-o", f"{long}/x.dsmodel")
    assert "File name too long" in refused("compile", tiny_source, "-o", "x", "--recipe", long)
    assert refused("compile", long, "-o", "x")
    assert refused("check-tokenizers", long, tiny_source)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--section", "identity", "--device", "none"], "--device: goes without --section"),
        (["--graph", "target", "--section", "identity"], "--graph: goes without --section"),
        (["-o", "x.onnx"], "--output: goes with --graph"),
        (["--driver", "12.4"], "--driver: goes with --device"),
        (["--device", "none", "--driver", "x", "--graph", "target"], "--device: goes without --graph"),
        (["--device", "sm_90", "--driver", "x.y"], "--driver: a CUDA version such as 12.4 is required, got 'x.y'"),
        (["--device", "sm_1"], "--device: none, a device's number or one of"),
        (["--device", ""], "--device: none, a device's number"),
        (["--section", ""], "--section: one of identity"),
        (["--graph", ""], "--graph: one of target/graph.onnx"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_of_inspect_that_do_not_go_together(refused, tiny_bundle, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused("inspect", tiny_bundle, *options)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_replaces_graphs_only_and_tells_of_itself_in_json(dsc, refused, tiny_bundle, tmp_path):
    output = tmp_path / "graph.onnx"
    for _ in range(2):
        status, out, _ = dsc("inspect", tiny_bundle, "--graph", "target", "-o", output, "--json")
        assert (status, json.loads(out)["graph"]) == (0, str(output))
        assert json.loads(out)["nbytes"] == output.stat().st_size
    mine = tmp_path / "notes.txt"
    mine.write_text("mine")
    assert "only an .onnx file may be replaced" in refused("inspect", tiny_bundle, "--graph", "target", "-o", mine)
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels", "--arch", "sm_80", "show", "dspark_kv_commit"], "--arch: is not for `dsc kernels show`"),
        (["kernels", "--json", "list", "x"], "--json: is not for `dsc kernels list`"),
        (["kernels", "show", "dspark_kv_commit", "--arch", "sm_1"], "known: sm_80"),
        (["kernels", "show", "dspark_kv_commit", "--axis", "batch=1", "--axis", "batch=2"], "one size is required"),
        (["kernels", "show", "dspark_kv_commit", "--axis", "batch=0"], "--axis batch: at least 1"),
        (["kernels", "show", "dspark_kv_commit", "--axis", "batch=-1"], "name=size is required, got 'batch=-1'"),
        (["kernels", "show", "dspark_kv_commit", "--axis", "beam=2"], "has no such axis"),
        (["kernels", "show", ""], "no kernel or variant"),
        (["schema", ""], "schema: one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_of_kernels_and_schema(dsc, arguments, message):
    status, _, err = dsc(*arguments)
    assert status == 2
    assert message in err


def test_a_report_with_problems_is_one_json_document(dsc, monkeypatch):
    report = {"fields": {}, "problems": ["onnxruntime is missing"]}
    monkeypatch.setattr("dsc.compiler.doctor.examine", lambda: report)
    status, out, err = dsc("doctor", "--json")
    assert (status, json.loads(out)) == (3, report)
    assert "1 problems found" in err


def test_outputs_that_speculation_changed_fail_the_benchmark(dsc, monkeypatch):
    report = {"threads": 1, "rounds": 1, "rows": [["one", 1.0, 1.0, 1.0, 1.0, 0.5, *[1.0] * 6, "NO"]]}
    monkeypatch.setattr("dsc.compiler.bench.bench_bundle", lambda *_: report)
    status, out, err = dsc("bench", "x", "--json")
    assert (status, json.loads(out)) == (1, report)
    assert "speculation changed the output of one" in err


def test_a_prompt_that_is_too_long_is_named_before_anything_is_timed(refused, tiny_bundle, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("short\n" + "the cat sat " * 600)
    assert "prompt 'the cat sat" in refused("bench", tiny_bundle, "--prompts", prompts)
    prompts.write_bytes(b"\xff\xfe")
    assert "cannot read the prompts" in refused("bench", tiny_bundle, "--prompts", prompts)
    assert "cannot read the prompts" in refused("bench", tiny_bundle, "--prompts", tmp_path)


def test_a_prompt_on_standard_input_is_text(refused, tiny_bundle, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    assert "standard input: text in utf-8 is required" in refused("run", tiny_bundle)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "."], "the trace cannot be written: Is a directory"),
        (["--trace", "no/such/folder"], "the trace cannot be written: No such file"),
        (["--max-length", "1"], "max_length: at least 2"),
        (["--threads", "5000"], "threads: at most 1024"),
        (["--provider", "tpu"], "provider: one of cpu, cuda"),
        (["--speculation", "17"], "--speculation: auto, off or a window 1 to 16"),
        (["--speculation", "0"], "--speculation"),
        (["--seed", str(2**64)], "sampling.seed"),
        (["--min-p", "1"], "sampling.min_p"),
        (["--temperature", "inf"], "sampling.temperature"),
        (["-n", "-5"], "max_new_tokens: at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_of_run(refused, tiny_bundle, options, message):
    assert message in refused("run", tiny_bundle, "-p", "x", *options)


def test_a_trace_that_runs_out_of_room_is_an_error(dsc, tiny_bundle):
    status, _, err = dsc("run", tiny_bundle, "-p", "x", "-n", "5", "--trace", "/dev/full")
    assert status == 2
    assert "error: /dev/full: the trace cannot be written: No space left on device" in err


def test_set_says_what_changes_nothing(dsc, refused, tiny_bundle, tmp_path):
    bundle = Path(shutil.copy(tiny_bundle, tmp_path / "set.dsmodel"))
    changes = ["proposers.eagle3.enabled=true", "fallback.probe_interval=9", "rules.short_window=3", "windows.max=6"]
    status, out, _ = dsc("set", bundle, *changes, "--json")
    assert status == 0
    report = json.loads(out)
    assert report["changed"]["windows.max"] == 6
    assert [note.partition(":")[0] for note in report["notes"]] == [
        "proposers.eagle3",
        "fallback.probe_interval",
        "rules",
    ]
    assert "note: rules: the policy is 'calibrated'" in dsc("set", bundle, "rules.short_window=5")[1]
    assert "policy" in refused("set", bundle, "policy=magic")
    assert "'deep' is not a field" in refused("set", bundle, "policy.deep=1")


def test_a_full_disk_behind_standard_output_is_an_error_and_a_reader_that_leaves_is_none():
    with open("/dev/full", "w") as full:
        done = subprocess.run([DSC, "schema", "manifest"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("error: standard output: cannot be written: No space left")
    for command in (["schema", "manifest"], ["kernels"]):
        with subprocess.Popen([DSC, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 0


def test_a_traceback_keeps_the_exit_code(dsc, tmp_path):
    status, _, err = dsc("check", tmp_path / "nothing", "--traceback")
    assert status == 2
    assert err.startswith("Traceback")
    assert "cannot be opened: No such file" in err


def test_names_are_shown_as_they_are(dsc, tiny_bundle, tmp_path):
    """Brackets are no markup, and bytes of a file name that are no text end no report."""
    for name in ("a[b] :cat: [#].dsmodel", os.fsdecode(b"caf\xe9.dsmodel")):
        bundle = Path(shutil.copy(tiny_bundle, tmp_path / name))
        status, out, _ = dsc("check", bundle, "--json")
        assert (status, json.loads(out)["bundle"]) == (0, str(bundle))
        status, out, _ = dsc("check", bundle)
        assert status == 0
        assert name.encode("utf-8", "backslashreplace").decode() in out.replace("\n", "")


def test_a_number_of_thousands_of_digits_is_none(refused, tiny_bundle):
    digits = "9" * 5000
    refused("run", tiny_bundle, "-p", "x", "--speculation", digits)
    refused("kernels", "show", "dspark_kv_commit", "--axis", f"batch={digits}")
    refused("inspect", tiny_bundle, "--device", digits)
    refused("inspect", tiny_bundle, "--device", "sm_90", "--driver", digits)
    refused("set", tiny_bundle, f"selector.rules.{digits}.path=slow")
    refused("set", tiny_bundle, f"windows.max={digits}")
    refused("plan", tiny_bundle, "--max-length", digits)
