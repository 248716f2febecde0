"""A CUDA bundle on a machine without a GPU: onnxruntime's CUDA provider over a stub runtime that remembers everything.

The graphs compute nothing here; a scripted model writes the logits instead (see `stub_cuda.device`). What is proved is
the host's part: where nodes run, what is copied, which stream, in which order, and how often the host waits.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import compile_for_cuda
import pytest
from cuda_bundle import cuda_bundle
from forward_graphs import HEADS, KV_HEADS, N_LAYERS
from scripted_lm import greedy_reference
from stub_cuda.build import PACKAGE, PROVIDER, WHY_NOT, environment
from stub_cuda.worker import table
from toy_bundle import toy_bundle

from dsc.kernels.attention_table import attention_variants
from dsc.kernels.gpu_targets import architecture
from dsc.runtime import load

WORKER = Path(__file__).parents[1] / "support" / "stub_cuda" / "worker.py"
TABLE = table("target", 80)
PROMPT = [5, 9, 2, 5, 9, 2, 7]
PLAIN = greedy_reference(TABLE, PROMPT, 40)
FILTERS = {"no filter": {}, "top-k": {"top_k": 7}, "top-p and min-p": {"top_p": 0.8, "min_p": 0.05}}


def _draft(window):
    return {"proposer": "self", "window": window, "fallback": False}


def _calls():
    greedy = {"off": "off", "auto": "auto", "self 3": _draft(3), "self 5": _draft(5), "ngram": {"proposer": "ngram"}}
    calls = {name: {"prompt": PROMPT, "max_new_tokens": 40, "speculation": how} for name, how in greedy.items()}
    calls["traced"] = {**calls["self 3"], "trace": os.devnull}
    for name, filters in FILTERS.items():
        for how, speculation, seed in (("off", "off", 11), ("self", _draft(4), 11), ("another seed", "off", 12)):
            sampling = {"temperature": 0.7, "seed": seed, **filters}
            call = {"prompt": PROMPT, "max_new_tokens": 30, "sampling": sampling, "speculation": speculation}
            calls[f"{name}, {how}"] = call
    return calls


CALLS = _calls()

pytestmark = pytest.mark.skipif(not PROVIDER.is_file(), reason=WHY_NOT)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return cuda_bundle(tmp_path_factory.mktemp("bundle") / "cuda.dsmodel", draft=True)


@pytest.fixture(scope="module")
def run(stubs):
    """Calls the worker."""

    def call(path, *calls, capability="9.0", kernels="auto"):
        command = [sys.executable, "-P", WORKER, path, capability, kernels]
        done = subprocess.run(
            command, input=json.dumps(calls), text=True, capture_output=True, check=False, env=environment(stubs)
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return call


def rounds(events):
    """Events between waits, the wait included."""
    text = "\n".join(events)
    return [piece.strip().splitlines() for piece in re.split(r"(?<=\n)(?=upload)", text) if piece.startswith("upload")]


def host_copies(events):
    """What graphs copy between device and host, or wait for."""
    return [event for event in events if event.startswith(("copy", "wait")) and "device_to_device" not in event]


def streams(events):
    return {re.search(r"stream (\w+)", event)[1] for event in events if "stream" in event}


def kinds(events):
    """First words, repetitions once."""
    words = [event.split()[0] if not event.startswith("launch") else event.split()[1] for event in events]
    return [word for i, word in enumerate(words) if i == 0 or words[i - 1] != word]


@pytest.fixture(scope="module")
def results(run, bundle):
    """Name -> result; all calls of one model, one after the other, the first twice."""
    made = run(bundle, *CALLS.values(), CALLS["off"])
    return dict(zip(("loaded", *CALLS, "again"), made, strict=True))


def test_every_node_runs_on_the_device_and_nothing_is_copied_between_them(results):
    loaded, plain = results["loaded"], results["off"]
    assert loaded["on_host"] == []
    assert loaded["kernels"] == {}
    assert plain["stats"]["kernels"] == "dspark"
    assert host_copies(plain["events"]) == []
    assert streams(plain["events"]) == {loaded["stream"]}


def test_a_step_is_one_copy_in_the_graph_the_verdict_one_copy_out_and_one_wait(results):
    steps = [kinds(step) for step in rounds(results["again"]["events"])]
    prompt, *rest = steps
    assert prompt[:3] == ["upload", "kernel", "row_stats"]
    assert len(rest) == 39
    for step in rest:
        assert step == ["upload", "kernel", "row_stats", "accept_greedy", "download", "synchronize"]


def test_a_block_of_drafts_waits_once_for_the_draft_and_once_for_the_verdict(results):
    spec = results["self 3"]
    assert 0 < spec["stats"]["accepted"] < spec["stats"]["proposed"]
    waits = [event for event in spec["events"] if event.startswith(("wait", "synchronize", "copy"))]
    guards = 2  # looked at before a generation
    blocks = sum(count for window, count in spec["stats"]["windows"].items() if int(window))
    assert len(waits) == guards + spec["stats"]["rounds"] + blocks


def test_what_a_trace_watches_is_read_from_the_device_and_changes_nothing(results):
    traced, untraced = results["traced"], results["self 3"]
    assert traced["ids"] == untraced["ids"]
    assert traced["stats"]["position_accepted"] == untraced["stats"]["position_accepted"]
    rows = [event for event in traced["events"] if event.startswith(f"download {4 * 80} ")]
    assert len(rows) == traced["stats"]["proposed"] + traced["stats"]["rounds"]


def test_a_certificate_of_the_cpu_is_not_passed_off_as_the_device_s(results):
    assert results["off"]["stats"]["certificate"] == "pass (measured with ort kernels on the CPU)"


@pytest.mark.parametrize("name", ["off", "auto", "self 3", "self 5", "ngram", "again"])
def test_greedy_output_is_the_target_s_own(results, name):
    assert results[name]["ids"] == PLAIN


@pytest.mark.parametrize("filters", FILTERS)
def test_sampled_output_is_a_function_of_prompt_and_seed_alone(results, filters):
    plain, spec, other = (results[f"{filters}, {how}"] for how in ("off", "self", "another seed"))
    assert plain["ids"] == spec["ids"] != other["ids"]
    assert spec["stats"]["accepted"] > 0
    assert plain["stats"]["kernels"] == "dspark"
    first = "row_cutoff" if FILTERS[filters] else "row_stats"
    assert [kind for kind in kinds(rounds(plain["events"])[-1]) if kind not in ("upload", "kernel")] == [
        first, "accept_sampled", "download", "synchronize",
    ]  # fmt: skip


@pytest.mark.parametrize("call", [{"ban": True}, {"sampling": {"logit_bias": {str(i): -1e9 for i in range(0, 80, 2)}}}])
def test_what_edits_logits_gets_them_on_the_host_and_the_statistics_say_so(run, bundle, call):
    banned = TABLE.copy()
    banned[:, ::2] = -1e30
    plain = greedy_reference(banned, PROMPT, 20)
    off, fast = ({"prompt": PROMPT, "max_new_tokens": 20, "speculation": kind, **call} for kind in ("off", "auto"))
    for result in run(bundle, off, fast)[1:]:
        assert result["ids"] == plain
        assert result["stats"]["kernels"] == "ort"
        assert "run on the host" in result["stats"]["kernels_reason"]


@pytest.mark.parametrize(
    ("with_kernels", "reason"),
    [(True, "built for sm_90, the device has compute capability 8.0"), (False, "not in the")],
)
def test_kernels_that_cannot_run_here_are_a_reason_and_the_output_stays(run, tmp_path, with_kernels, reason):
    path = cuda_bundle(tmp_path / "other.dsmodel", draft=True, with_kernels=with_kernels)
    _, result = run(path, {"prompt": PROMPT, "max_new_tokens": 20, "speculation": _draft(3)}, capability="8.0")
    assert result["ids"] == PLAIN[:20]
    assert result["stats"]["kernels"] == "ort"
    assert reason in result["stats"]["kernels_reason"]


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_other_precisions_run_whole_on_the_device_too(run, tmp_path, precision):
    path = cuda_bundle(tmp_path / "other.dsmodel", precision=precision)
    loaded, result = run(path, {"prompt": PROMPT, "max_new_tokens": 8})
    assert loaded["on_host"] == []
    assert result["ids"] == PLAIN[:8]
    assert host_copies(result["events"]) == []


def test_the_rows_of_a_large_vocabulary_are_read_in_parts(run, tmp_path):
    path = cuda_bundle(tmp_path / "wide.dsmodel", draft=True, vocab=20_000)
    _, result = run(path, {"prompt": PROMPT, "max_new_tokens": 20, "speculation": _draft(3)})
    assert result["ids"] == greedy_reference(table("target", 20_000), PROMPT, 20)
    assert result["stats"]["accepted"] > 0
    launches = [event.split()[3:6] for event in result["events"] if event.startswith("launch row_stats")]
    assert {(rows, parts) for rows, parts, _ in launches} >= {("1", "3"), ("4", "3")}


def test_secure_rollback_clears_rejected_rows_on_the_device(run, tmp_path):
    path = cuda_bundle(tmp_path / "secure.dsmodel", draft=True, secure=True)
    _, result = run(path, {"prompt": PROMPT, "max_new_tokens": 20, "speculation": _draft(3)})
    assert result["ids"] == PLAIN[:20]
    assert [event for event in result["events"] if event.startswith("clear")]


def test_without_a_driver_the_error_names_it(bundle):
    code = f"from dsc.runtime import load; load({str(bundle)!r}, provider='cuda')"
    environment = os.environ | {"PYTHONPATH": str(PACKAGE)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, text=True, capture_output=True, check=False, env=environment)
    assert "HostError: libcuda.so.1: the CUDA driver library cannot be loaded" in done.stderr


def test_a_bundle_for_the_cpu_alone_is_refused_with_what_to_do(run, tmp_path):
    path = toy_bundle(tmp_path / "cpu.dsmodel", TABLE)
    assert run(path, {"prompt": PROMPT})[0]["error"] == (
        f"BundleError: {path}: a forward graph of the target for cuda is required, the bundle has them for: cpu "
        "(compile it with --backend cuda)"
    )


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """A bundle with a graph whose attention its own kernels run."""
    return cuda_bundle(tmp_path_factory.mktemp("native") / "native.dsmodel", native=True, max_length=1500)


def attention(events):
    """(rows of grid, block and arguments) of every attention launch, as numbers."""
    found = [event.split() for event in events if event.startswith("launch verify_head_tiled")]
    return [(list(map(int, e[3:6])), int(e[7]), [int(word, 16) for word in e[e.index("args") + 1 :]]) for e in found]


def test_attention_is_launched_inside_the_graph_over_the_arena_s_pools_on_its_stream(run, native):
    loaded, result = run(native, {"prompt": PROMPT, "max_new_tokens": 20, "speculation": {"proposer": "ngram"}})
    assert loaded["on_host"] == []
    assert result["ids"] == PLAIN[:20]
    assert (result["stats"]["kernels"], result["stats"]["kernels_reason"]) == ("dspark", "")
    assert host_copies(result["events"]) == []
    assert streams(result["events"]) == {loaded["stream"]}
    launches = attention(result["events"])
    n_forwards = sum(event.startswith("upload") for event in result["events"])
    assert len(launches) == N_LAYERS * n_forwards
    rows = [args[13] for _, _, args in launches]
    assert rows[:N_LAYERS] == [len(PROMPT)] * N_LAYERS
    scale = int.from_bytes(struct.pack("<f", 0.25), "little")
    for i, (grid, threads, args) in enumerate(launches):
        layer = i % N_LAYERS
        pools = [int(loaded["pools"][f"{role}_pool.{layer}"], 16) for role in "kv"]
        assert args[3:5] == pools
        assert args[14:22] == [1536, KV_HEADS, HEADS // KV_HEADS, 0xFFFFFFFF, 0, 0, scale, 0]
        assert (grid, threads) == ([1, KV_HEADS, 1], 128)


def test_a_long_text_is_cut_into_parts_that_a_second_launch_joins(run, native):
    prompt = [i * 7 % 80 for i in range(1100)]
    _, result = run(native, {"prompt": prompt, "max_new_tokens": 3, "speculation": "off"})
    assert result["ids"] == greedy_reference(TABLE, prompt, 3)
    assert sum(event.startswith("upload") for event in result["events"]) == 3 + 2  # pieces of 512 rows, then tokens
    last = attention(result["events"])[-1]
    assert last[0] == [1, KV_HEADS, 2]  # 1,100 keys: two parts of at least four tiles of 128
    joins = [event.split() for event in result["events"] if event.startswith("launch join_parts")]
    assert joins[-1][3:6] == [str(HEADS), "1", "1"]
    assert [int(word, 16) for word in joins[-1][joins[-1].index("args") + 5 :]] == [2, 1, HEADS, 0, 0, 0]
    tall = attention(result["events"])[0]
    assert (tall[0], tall[1], tall[2][13]) == ([1, KV_HEADS, 1], 256, 32)  # 64 packed rows take the taller tile


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kernels": "none"}, "attention is onnxruntime's: not built"),
        ({"kernels": "ort"}, "attention is onnxruntime's: not asked for"),
        ({"capability": "8.0"}, "built for sm_90, the device has compute capability 8.0"),
    ],
)
def test_without_library_or_kernels_the_attention_is_onnxruntime_s_and_statistics_say_so(run, native, options, reason):
    _, result = run(native, {"prompt": PROMPT, "max_new_tokens": 10}, **options)
    assert result["ids"] == PLAIN[:10]
    assert reason in result["stats"]["kernels_reason"]
    assert attention(result["events"]) == []


def test_kernels_that_are_required_and_cannot_be_had_are_an_error(run, native, bundle):
    error = run(native, {"prompt": PROMPT}, kernels="native", capability="8.0")[0]["error"]
    assert error.startswith("HostError: kernels: the bundle's attention kernels are required: ")
    error = run(bundle, {"prompt": PROMPT}, kernels="native")[0]["error"]
    assert error.startswith("HostError: kernels: the native library is required: the bundle's graphs have none")


@pytest.mark.slow
def test_a_compiled_bundle_runs_whole_on_the_device(run, tmp_path, monkeypatch):
    """What `dsc compile` makes: weights and rotary tables as a checkpoint has them, a draft, two ways of attention."""
    needed = [variant.name for variant in attention_variants(64, "float16", architecture(compile_for_cuda.ARCH))]
    monkeypatch.setattr(compile_for_cuda, "FEW", (*compile_for_cuda.FEW, *needed))
    path = tmp_path / "compiled.dsmodel"
    options = {"draft": {"kind": "self", "precision": "int8"}, "cuda_attention": "dspark"}
    compile_for_cuda.compile_few(compile_for_cuda.kernel_model_dir(tmp_path / "source"), path, tmp_path, **options)
    plain = greedy_reference(table("target", load(path).bundle.manifest.target.info.vocab_size), PROMPT, 40)
    call = {"prompt": PROMPT, "max_new_tokens": 40, "speculation": _draft(3)}
    for kernels in ("ort", "native"):
        loaded, result = run(path, call, capability="8.0", kernels=kernels)
        assert loaded["on_host"] == []
        assert result["ids"] == plain[: len(result["ids"])]
        assert result["stats"]["accepted"] > 0
        assert host_copies(result["events"]) == []
        assert bool(attention(result["events"])) == (kernels == "native")
