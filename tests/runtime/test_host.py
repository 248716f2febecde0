"""Threads are those that were asked for, in every session, on the processors that this process may use."""

import subprocess
import sys

import numpy as np
from scripted_lm import greedy_reference
from toy_bundle import toy_bundle

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
