"""A CUDA bundle on a machine without a GPU: onnxruntime's CUDA provider over a stub runtime that remembers everything.

The graphs compute nothing here; a scripted model writes the logits instead (see `stub_cuda.device`). What is proved is
the host's part: where nodes run, what is copied, which stream, in which order, and how often the host waits.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_bundle import cuda_bundle
from scripted_lm import greedy_reference
from stub_cuda.build import build_stubs
from stub_cuda.worker import TABLE
from toy_bundle import toy_bundle

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "build" / "ort-gpu"
PROVIDER = PACKAGE / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"
WORKER = REPOSITORY / "tests" / "support" / "stub_cuda" / "worker.py"
PROMPT = [5, 9, 2, 5, 9, 2, 7]
PLAIN = greedy_reference(TABLE, PROMPT, 40)
FILTERS = {"no filter": {}, "top-k": {"top_k": 7}, "top-p and min-p": {"top_p": 0.8, "min_p": 0.05}}


def _draft(window):
    return {"proposer": "self", "window": window, "fallback": False}


def _calls():
    greedy = {"off": "off", "auto": "auto", "self 3": _draft(3), "self 5": _draft(5), "ngram": {"proposer": "ngram"}}
    calls = {name: {"prompt": PROMPT, "max_new_tokens": 40, "speculation": how} for name, how in greedy.items()}
    for name, filters in FILTERS.items():
        for how, speculation, seed in (("off", "off", 11), ("self", _draft(4), 11), ("another seed", "off", 12)):
            sampling = {"temperature": 0.7, "seed": seed, **filters}
            call = {"prompt": PROMPT, "max_new_tokens": 30, "sampling": sampling, "speculation": speculation}
            calls[f"{name}, {how}"] = call
    return calls


CALLS = _calls()

pytestmark = pytest.mark.skipif(not PROVIDER.is_file(), reason="needs onnxruntime-gpu in build/ort-gpu: make ort-gpu")


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    return build_stubs(PROVIDER, tmp_path_factory.mktemp("stubs"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return cuda_bundle(tmp_path_factory.mktemp("bundle") / "cuda.dsmodel", draft=True)


@pytest.fixture(scope="module")
def run(stubs):
    """Calls the worker."""

    def call(path, *calls, capability="9.0"):
        variables = {"LD_LIBRARY_PATH": str(stubs), "PYTHONPATH": str(PACKAGE)}
        command = [sys.executable, "-P", WORKER, path, capability]
        done = subprocess.run(
            command, input=json.dumps(calls), text=True, capture_output=True, check=False, env=os.environ | variables
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return call


def rounds(events):
    """Events between waits, the wait included."""
    text = "\n".join(events)
    return [piece.strip().splitlines() for piece in re.split(r"(?<=\n)(?=upload)", text) if piece.startswith("upload")]


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
    assert (plain["stats"]["kernels"], plain["stats"]["kernels_reason"]) == ("dspark", "")
    assert [event for event in plain["events"] if event.startswith(("copy", "wait"))] == []
    streams = {re.search(r"stream (\w+)", event)[1] for event in plain["events"] if "stream" in event}
    assert streams == {loaded["stream"]}


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
    assert [event for event in result["events"] if event.startswith(("copy", "wait"))] == []


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
