"""Threads are those that were asked for, in every session, on the processors that this process may use."""

import subprocess
import sys

import numpy as np
import onnx.parser
from scripted_lm import greedy_reference
from toy_bundle import toy_bundle

from dsc.kernels.native import NativeLibrary
from dsc.runtime.host import SessionSettings, create_session

TABLE = np.random.default_rng(2).normal(size=(20, 20)).astype(np.float32)
SCRIPT = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy, onnxruntime
from dsc.runtime import load

def n_threads():
    return len(os.listdir("/proc/self/task"))

before = n_threads()
model = load(sys.argv[1], verify="never")
speculation = {"proposer": "self", "window": 3, "fallback": False}
alone = model.generate([1], 10, speculation=speculation)
engine = model.engine(slots=3, background=False)
tickets = [engine.submit([1], max_new_tokens=10, speculation=speculation) for _ in range(3)]
engine.run()
assert alone.stats.accepted > 0
assert {ticket.result().ids for ticket in tickets} == {alone.ids}
print(n_threads() - before, *alone.ids)
"""


def test_one_allowed_processor_means_one_thread_for_target_draft_and_engine(tmp_path):
    path = toy_bundle(tmp_path / "toy.dsmodel", TABLE, TABLE, draft_kind="self")
    done = subprocess.run([sys.executable, "-P", "-c", SCRIPT, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["0", *map(str, greedy_reference(TABLE, [1], 10))]


def test_threads_wait_by_spinning_and_stop_when_a_run_ends():
    """So that of two sessions the one that waits leaves the processors to the other."""
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[N] x) => (float[N] y) { y = Abs(x) }'
    graph = onnx.parser.parse_model(text)
    settings = SessionSettings("cpu", 2, "", NativeLibrary(None, "none is needed"))
    options = create_session(graph.SerializeToString(), settings, "graph", 2).get_session_options()
    assert options.intra_op_num_threads == 2
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
