"""A tiny model compiled by the real compiler, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dsc.bundle_schema.container import open_bundle
from dsc.compiler.compile import compile_bundle
from dsc.compiler.inspect import inspect_bundle
from dsc.compiler.request import build_request
from dsc.runtime import load

PROMPTS = ["the cat sat on the mat the cat sat", "a", "12345 \u00fc\u00f1\u00ef \u6771\u4eac"]


@pytest.fixture(scope="module")
def model(tiny_bundle):
    return load(tiny_bundle, threads=1)


@pytest.mark.parametrize("proposer", ["self", "ngram"])
@pytest.mark.parametrize("window", [1, 3, 8, 16])
def test_greedy_output_is_plain_decodings(model, proposer, window):
    for prompt in PROMPTS:
        plain = model.generate(prompt, 40, speculation="off")
        fast = model.generate(prompt, 40, speculation={"proposer": proposer, "window": window, "fallback": False})
        assert fast.ids == plain.ids
        assert fast.text == plain.text == model.bundle.codec.decode(plain.ids)


def test_the_longest_prompt_fits_and_one_token_more_does_not(model):
    assert len(model.generate([1] * 511).ids) == 1
    with pytest.raises(Exception, match="at most 511 tokens leave room for an answer in 512, got 512"):
        model.generate([1] * 512)


def test_turns_of_token_ids_over_the_kept_cache_are_fresh_runs(model):
    ids = model.encode(PROMPTS[0])
    for _ in range(4):
        turn = model.stream(ids, 9, reuse_cache=True).finish()
        assert turn.ids == model.generate(ids, 9, speculation="off").ids
        ids = [*ids, *turn.ids, 7, 8]


def test_new_processes_count_the_same(tiny_bundle):
    """With the bundle's costs as they are; those that follow the rounds depend on a clock."""
    script = (
        "import json, sys; from dsc.runtime import load; model = load(sys.argv[1], threads=1); "
        "model.update_config({'calibrated.refresh_costs': False}); stats = model.generate(sys.argv[2], 32).stats; "
        "print(json.dumps([stats.proposed, stats.evaluated, stats.accepted, stats.rounds, stats.emitted]))"
    )
    command = [sys.executable, "-P", "-c", script, tiny_bundle, PROMPTS[0]]
    runs = [subprocess.run(command, capture_output=True, check=True, text=True).stdout for _ in range(3)]
    assert len(set(runs)) == 1
    assert json.loads(runs[0])[0] > 0


def test_inspect_says_which_axes_are_free(tiny_bundle):
    inputs = inspect_bundle(tiny_bundle)["graph target/graph.onnx"]["inputs"]
    assert "input_ids int64['batch', 'seq']" in inputs
    with open_bundle(tiny_bundle) as bundle:
        forwards = [graph for graph in bundle.manifest.graphs() if graph.role.startswith("forward")]
    for graph in forwards:
        before, after = ({spec.name: spec.axes for spec in specs} for specs in (graph.inputs, graph.outputs))
        pools = [name for name in before if "_pool." in name]
        assert len(pools) == 4
        for name in pools:
            assert before[name] == after[name.replace("_pool.", "_pool_out.")]
            assert before[name][2] == "max_rows"


def test_another_length_is_another_plan_for_the_same_graphs(tiny_source, tmp_path):
    """The graphs' own shapes stay free of the length; plan, rotary table and visible length follow it."""
    output = tmp_path / "tiny.dsmodel"
    options = {"target": tiny_source, "output": output, "gate": {"n_prompts": 1, "n_tokens": 8, "n_draws": 0}}

    def compiled(max_length):
        compile_bundle(build_request({**options, "max_length": max_length, "force": True}))
        with open_bundle(output) as bundle:
            specs = [(graph.inputs, graph.outputs) for graph in bundle.manifest.graphs() if graph.role == "forward"]
            tables = {w.shape[0] for w in bundle.weights() if any("rotary_cos" in user for user in w.users)}
        return specs, tables, inspect_bundle(output)["kv_plan cpu"]["positions"]

    long, short = compiled(128), compiled(64)
    assert short[0] == long[0]
    assert (short[1], long[1]) == ({64 + 17}, {128 + 17})
    assert (short[2], long[2]) == (64, 128)
    assert [entry.name for entry in tmp_path.iterdir()] == [output.name]
    assert load(output, threads=1).max_length == 64
