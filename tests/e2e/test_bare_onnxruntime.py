"""Every graph of a compiled bundle in bare onnxruntime: no library, no custom operator, no package of this project."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from dsc.bundle_schema.container import open_bundle
from dsc.compiler.bundle_tools import extract_graph
from dsc.runtime import load

PROMPT = [5, 9, 17, 5, 9, 17, 44, 200]
SCRIPT = """
import json, sys
import numpy as np
import onnxruntime as ort

session = ort.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
pools = {
    value.name: np.zeros((1, value.shape[1], 64, value.shape[3]), kinds[value.type])
    for value in session.get_inputs() if "_pool." in value.name
}
tokens, past, said = json.loads(sys.argv[2]), 0, []
for _ in range(6):
    n = len(tokens)
    feeds = {
        "input_ids": np.array([tokens]), "position_ids": np.arange(past, past + n)[None],
        "logit_rows": np.array([n - 1]), "past_lengths": np.array([past], np.int32),
        "row_offsets": np.array([0, n], np.int32),
    }
    names = {value.name for value in session.get_inputs()}
    feeds = {name: value for name, value in feeds.items() if name in names} | pools
    outputs = [value.name for value in session.get_outputs()]
    found = dict(zip(outputs, session.run(outputs, feeds)))
    pools = {name: found[name.replace("_pool.", "_pool_out.")] for name in pools}
    past, tokens = past + n, [int(found["logits"][0, 0].argmax())]
    said += tokens
assert not [name for name in sys.modules if name.partition(".")[0] == "dsc"]
print(json.dumps(said))
"""


@pytest.mark.parametrize("member", ["target/graph.onnx", "target/graph.native.onnx"])
def test_a_target_s_graph_says_without_the_library_what_the_model_says(tiny_bundle, tmp_path, member):
    with open_bundle(tiny_bundle) as bundle:
        assert member in {graph.member for graph in bundle.manifest.target.graphs}
    bundle_path = shutil.copy(tiny_bundle, tmp_path / "tiny.dsmodel")
    path = extract_graph(bundle_path, member, tmp_path / "graph.onnx")
    command = [sys.executable, "-P", "-c", SCRIPT, path, json.dumps(PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == list(load(tiny_bundle).generate(PROMPT, 6, ignore_eos=True).ids)
