"""Every command with good and bad input: what it prints, and the exit code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsc.compiler.cli import main
from dsc.compiler.stages import STAGES
from dsc.passes.pipeline import parse_pipeline

DSC = Path(sys.executable).with_name("dsc")


def dsc(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([DSC, *map(str, arguments)], capture_output=True, text=True, check=False)


def good(*arguments: object) -> str:
    done = dsc(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def bad(code: int, *arguments: object) -> str:
    done = dsc(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_help_lists_every_command_and_imports_nothing_heavy():
    assert "compile" in good("--help")
    probe = "import sys; import dsc.compiler.cli; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-P", "-c", probe], capture_output=True, text=True, check=True).stdout
    loaded = {name.partition(".")[0] for name in modules.split()}
    assert not loaded & {"torch", "transformers", "onnx", "onnx_ir", "onnxruntime", "numpy", "pydantic", "triton"}


def test_inspect_prints_every_section(tiny_bundle):
    text = good("inspect", tiny_bundle)
    for section in ("identity", "provenance", "needs", "target", "draft", "kv_plan", "schedule", "certificate"):
        assert section in text
    report = json.loads(good("inspect", tiny_bundle, "--json"))
    assert report["identity"]["verdict"] == "pass"
    native = report["graph target/graph.native.onnx"]
    assert "VerifyAttention" in native["operators"] or "QkvAttention" in native["operators"]
    assert native["bodies"] != "none needed"
    assert "ai.onnx" in native["IR version, opsets"]
    assert "float32" in report["parameters"]
    assert report["kv_plan cpu"]["bytes per token"] > 0
    assert {"members", "tokenizer", "kernels", "recipe"} <= report.keys()
    assert json.loads(good("inspect", tiny_bundle, "--json", "--section", "kv_plan")).keys() == {"kv_plan cpu"}


def test_inspect_refuses_what_is_not_there(tiny_bundle, tmp_path):
    assert "one of identity" in bad(2, "inspect", tiny_bundle, "--section", "nonsense")
    assert "No such file" in bad(2, "inspect", tmp_path / "nothing.dsmodel")
    (tmp_path / "text.dsmodel").write_text("hello")
    bad(2, "inspect", tmp_path / "text.dsmodel")


def test_inspect_writes_a_graph_that_onnxruntime_opens_beside_the_bundle(tiny_bundle, tmp_path):
    import onnxruntime as ort

    bundle = shutil.copy(tiny_bundle, tmp_path / "renamed.dsmodel")
    good("inspect", bundle, "--graph", "target")
    session = ort.InferenceSession(tmp_path / "renamed.target.graph.onnx", providers=["CPUExecutionProvider"])
    assert session.get_outputs()[0].name == "logits"
    assert "one of target/graph.onnx" in bad(2, "inspect", bundle, "--graph", "teacher")


def test_check_passes_a_sound_bundle_and_fails_a_changed_one(tiny_bundle, tmp_path):
    assert json.loads(good("check", tiny_bundle, "--json"))["ok"] is True
    changed = Path(shutil.copy(tiny_bundle, tmp_path / "changed.dsmodel"))
    data = bytearray(changed.read_bytes())
    data[8192] ^= 1
    changed.write_bytes(data)
    assert "hashes" in bad(1, "check", changed)


def test_a_failed_check_is_one_json_document(tiny_bundle, tmp_path):
    changed = Path(shutil.copy(tiny_bundle, tmp_path / "changed.dsmodel"))
    good("set", changed, "windows.default=6")
    for command in (
        ["diff", tiny_bundle, changed],
        ["plan", tiny_bundle, "--memory", "0.0001"],
        ["check", tmp_path / "nothing"],
    ):
        done = dsc(*command, "--json")
        assert done.returncode == (2 if command[0] == "check" else 1)
        assert json.loads(done.stdout)


def test_plan_answers_both_questions_and_draws(tiny_bundle, tmp_path):
    picture = tmp_path / "plan.svg"
    report = json.loads(good("plan", tiny_bundle, "--memory", "1", "--picture", picture, "--json"))
    assert report["fits"] is True
    assert report["longest_max_length"] == 512
    assert "<svg" in picture.read_text()
    assert "target" in good("plan", tiny_bundle, "--picture", tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "positions fit" in bad(1, "plan", tiny_bundle, "--memory", "0.0001")
    assert "at most" in bad(2, "plan", tiny_bundle, "--max-length", "9999")
    assert "ending" in bad(2, "plan", tiny_bundle, "--picture", tmp_path / "plan.txt")
    assert "cannot be written: No such file" in bad(2, "plan", tiny_bundle, "--picture", tmp_path / "no" / "plan.png")


def test_a_compile_tells_stages_passes_reasons_and_its_recipe(tiny_source, tmp_path):
    dump, one, two = tmp_path / "dump", tmp_path / "one.dsmodel", tmp_path / "two.dsmodel"
    dump.mkdir()
    common = ["--gate-prompts", 1, "--gate-tokens", 8, "--reproducible"]
    dumped = ["--dump-after", "fold-constants", "--dump-dir", dump]
    report = json.loads(good("compile", tiny_source, "-o", one, *common, *dumped, "--json"))
    assert [stage["name"] for stage in report["stages"]] == list(STAGES)
    assert all(stage["seconds"] >= 0 and stage["peak_rss_nbytes"] > 2**24 for stage in report["stages"])
    assert list(dump.iterdir())
    text = good("compile", tiny_source, "-o", two, *common, "--time-passes", "--explain")
    assert "passes of target" in text
    assert "did not fire" in text
    stored = json.loads(json.loads(good("inspect", two, "--json", "--section", "recipe"))["recipe"]["recipe"])
    assert stored["reproducible"] is True
    assert stored["gate"]["n_prompts"] == 1


def test_set_reseals_and_refuses_whole(tiny_bundle, tmp_path):
    bundle = Path(shutil.copy(tiny_bundle, tmp_path / "set.dsmodel"))
    good("set", bundle, "windows.default=6", "fallback.max_overhead=0.02")
    assert json.loads(good("check", bundle, "--json"))["ok"] is True
    # as wide as the gate measured costs: 16 rows
    assert json.loads(good("inspect", bundle, "--json"))["schedule"]["windows"] == "2..15, first 6"
    before = bundle.read_bytes()
    assert "windows" in bad(2, "set", bundle, "windows.default=99")
    assert "nonsense" in bad(2, "set", bundle, "nonsense.field=1")
    assert "key=value" in bad(2, "set", bundle, "windows")
    assert "one value" in bad(2, "set", bundle, "windows.default=4", "windows.default=6")
    assert bundle.read_bytes() == before
    assert "config" in dsc("diff", tiny_bundle, bundle).stdout
    assert dsc("diff", bundle, bundle).returncode == 0


def test_run_streams_text_with_and_without_speculation(tiny_bundle):
    plain = good("run", tiny_bundle, "--raw", "-p", "the cat", "-n", 8, "--speculation", "off", "--json")
    fast = good("run", tiny_bundle, "--raw", "-p", "the cat", "-n", 8, "--speculation", "3", "--json")
    assert json.loads(plain)["ids"] == json.loads(fast)["ids"]
    assert json.loads(fast)["stats"]["proposed"] > 0
    assert "auto, off" in bad(2, "run", tiny_bundle, "-p", "x", "--speculation", "fast")
    assert "empty" in bad(2, "run", tiny_bundle, "-p", "")
    assert bad(3, "run", tiny_bundle, "-p", "x", "--provider", "cuda")


def test_bench_compares_with_plain_decoding(tiny_bundle):
    report = json.loads(good("bench", tiny_bundle, "-n", 8, "--rounds", 1, "--json"))
    for _, plain, fast, ratio, per_round, acceptance, *latencies, same in report["rows"]:
        assert min(plain, fast, ratio, *latencies) > 0
        assert per_round >= 1 >= acceptance >= 0
        assert latencies[1] <= latencies[2]
        assert latencies[4] <= latencies[5]
        assert same == "yes"


def test_bench_takes_prompts_as_they_are_or_through_the_chat_template(tiny_bundle, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the cat sat\n")
    options = ("bench", tiny_bundle, "--prompts", prompts, "-n", 8, "--rounds", 1, "--json")
    raw, chat = (json.loads(good(*options, way))["rows"] for way in ("--raw", "--chat"))
    assert [row[0] for row in raw] == [row[0] for row in chat] == ["the cat sat"]


def test_schema_prints_what_is_published():
    names = good("schema").split()
    assert "manifest" in names
    for name in names:
        assert json.loads(good("schema", name))["type"] == "object"
    assert "one of" in bad(2, "schema", "nonsense")


def test_passes_and_doctor():
    listed = json.loads(good("passes", "--json"))
    names = {row["name"] for row in listed["passes"]}
    assert {"fold-constants", "lower-attention", "quantize-weights"} <= names
    for row in listed["pipelines"]:
        used = [item.name for item in parse_pipeline(row["passes"])]
        assert set(used) <= names
        assert ("quantize-weights" in used) == (row["precision"] == "int4")
    assert json.loads(good("doctor", "--json"))["problems"] == []


def test_kernels_are_listed_and_shown_without_a_gpu():
    lines = json.loads(good("kernels", "--json"))
    assert "dspark_verify_head_tiled" in {line["kernel"] for line in lines}
    sheet = json.loads(good("kernels", "show", "dspark_kv_rollback", "--arch", "sm_80", "--json"))
    assert sheet["local"] == 0
    assert "known: sm_80" in bad(2, "kernels", "--arch", "sm_999")
    assert "no kernel" in bad(2, "kernels", "show", "nonsense")
    assert "name=size" in bad(2, "kernels", "show", "dspark_kv_rollback", "--axis", "batch")


def test_check_tokenizers(tiny_bundle, tiny_source):
    assert json.loads(good("check-tokenizers", tiny_source, tiny_bundle, "--json"))["compatible"] is True
    assert "nothing is" in bad(2, "check-tokenizers", tiny_source, "/nonexistent")


def test_tokenizers_that_do_not_fit_are_shown_with_the_first_differing_id(tiny_source, tmp_path):
    files = {name: (tiny_source / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    content = json.loads(files["tokenizer.json"])
    vocabulary = content["model"]["vocab"]
    a, b = "a", "b"
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    for name, text in (files | {"tokenizer.json": json.dumps(content)}).items():
        (tmp_path / name).write_text(text)
    arguments = ("check-tokenizers", tmp_path, tiny_source, "--text", "a b")
    done = dsc(*arguments, "--json")
    report = json.loads(done.stdout)
    first = min(vocabulary[a], vocabulary[b])
    assert (done.returncode, report["compatible"]) == (1, False)
    assert report["differences"][0] == [first, *sorted((a, b), key=vocabulary.__getitem__)]
    assert report["on_text"]
    assert f"first {first}" in bad(1, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "int3"], "weights.precision"),
        (["--window", "17"], "window"),
        (["--max-length", "9999"], "at most 512"),
        (["--passes", "no-such-pass"], "no such pass"),
        (["--draft", "/nonexistent"], "nothing is"),
        (["--recipe", "/nonexistent.yaml"], "cannot read the recipe"),
    ],
)
def test_compile_refuses_bad_options_and_writes_nothing(tiny_source, tmp_path, arguments, message):
    output = tmp_path / "out.dsmodel"
    assert message in bad(2, "compile", tiny_source, "-o", output, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_compile_does_not_replace_a_file_unasked_nor_a_checkpoint_ever(tiny_source, tmp_path):
    output = tmp_path / "out.dsmodel"
    output.write_text("mine")
    assert "--force" in bad(2, "compile", tiny_source, "-o", output)
    assert "a folder" in bad(2, "compile", tiny_source, "-o", tmp_path, "--force")
    assert "must not replace the checkpoint" in bad(2, "compile", output, "-o", output, "--force")
    (tmp_path / "link").symlink_to(output)
    draft = ["--draft", output, "-o", tmp_path / "link", "--force"]
    assert "must not replace the checkpoint" in bad(2, "compile", tiny_source, *draft)
    assert output.read_text() == "mine"
    precious = tmp_path / "config.json"
    precious.write_text("{}")
    assert "only a .dsmodel file may be replaced" in bad(2, "compile", tiny_source, "-o", precious, "--force")
    assert precious.read_text() == "{}"


def test_a_graph_is_never_written_over_its_bundle(tiny_bundle, tmp_path):
    bundle = Path(shutil.copy(tiny_bundle, tmp_path / "toy.dsmodel"))
    before = bundle.read_bytes()
    (tmp_path / "link").symlink_to(bundle)
    for output in (bundle, tmp_path / "link", tmp_path / "." / bundle.name):
        assert "another file" in bad(2, "inspect", bundle, "--graph", "target", "-o", output)
    assert "cannot be written" in bad(2, "inspect", bundle, "--graph", "target", "-o", tmp_path / "no" / "folder")
    assert bundle.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-p", "x", "--temperature", "nan"], "sampling.temperature"),
        (["run", "-p", "x", "--top-k", "-1"], "sampling.top_k"),
        (["run", "-p", "x", "--top-p", "2"], "sampling.top_p"),
        (["run", "-p", "x", "--seed", "-1"], "sampling.seed"),
        (["run", "-p", "x", "-n", "0"], "max_new_tokens: at least 1"),
        (["run", "-p", "x", "--threads", "0"], "threads: at least 1"),
        (["run", "-p", "x", "--max-length", "9999"], "max_length: at most 512 is allowed, got 9999"),
        (["run", "-p", "x", "--stop", ""], "stop: texts of at least one character"),
        (["run", "-p", "x y " * 2000], "prompt: at most 511 tokens leave room for an answer in 512, got "),
        (["bench", "--rounds", "0"], "--rounds: at least 1"),
        (["bench", "-n", "0"], "max_new_tokens: at least 1"),
        (["bench", "--prompts", "/dev/null"], "at least one prompt"),
        (["plan", "--memory", "nan"], "--memory: a positive number"),
        (["plan", "--slots", "0"], "slots: 1 to 256 are possible, got 0"),
        (["plan", "--slots", "1000000"], "slots: 1 to 256 are possible, got 1000000"),
        (["plan", "--max-length", "0"], "max_length: at least 1 is required, got 0"),
        (["set", "windows.default=nan"], "windows.default"),
        (["set", "=5"], "key=value"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_a_wrong_option_is_named(tiny_bundle, arguments, message, monkeypatch, capsys):
    before = tiny_bundle.stat()
    monkeypatch.setattr(sys, "argv", ["dsc", arguments[0], str(tiny_bundle), *arguments[1:]])
    with pytest.raises(SystemExit) as exit_status:
        main()
    assert exit_status.value.code == 2
    assert message in capsys.readouterr().err
    assert (tiny_bundle.stat().st_ino, tiny_bundle.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_recipe_and_flags_meet_in_the_dry_run(tiny_source, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"target: {tiny_source}\nmax_length: 64\ndraft:\n  kind: self\n  precision: int8\n")
    report = json.loads(
        good("compile", "--recipe", recipe, "-o", tmp_path / "x", "--max-length", 128, "--dry-run", "--json")
    )
    assert report["target"]["max length"] == 128
    assert report["draft"]["precision"] == "int8"
    recipe.write_text("target: [")
    assert "YAML" in bad(2, "compile", "--recipe", recipe, "-o", tmp_path / "x", "--dry-run")
    recipe.write_text("tarket: x")
    assert "tarket" in bad(2, "compile", tiny_source, "--recipe", recipe, "-o", tmp_path / "x", "--dry-run")
