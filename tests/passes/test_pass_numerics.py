"""What a graph computes after each pass: every pass alone, and the pipelines up to every pass of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from exported_families import exported_family
from forward_graphs import forward_graph
from pass_graphs import session

from dsc.passes import ALL_PASSES
from dsc.passes.attach_bodies import AttachBodiesPass
from dsc.passes.pass_order import kernel_passes, layout_passes, shared_passes
from dsc.passes.pipeline import parse_pipeline, run_pipeline

FAMILIES = ("llama", "gemma3_text", "qwen3", "qwen3_moe")
GRAPHS = ("written by hand", "llama", "gemma3_text", pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_moe")
CUTS = ((1, (0, 7, 8, 11)), (2, (0, 4, 5)), (3, (0, 4, 5)), (3, (0, 1, 2)))
"""Sequences, and where one run over them ends and the next begins: onnxruntime's attention takes several rows after
others of a single sequence only."""
ROWS = 32
EXACT, ROUNDED, HALF, EIGHT_BITS = 0.0, 1e-5, 2e-2, 5e-2
"""Largest difference of logits, relative to their range: nothing is computed anew, sums are taken in another order,
numbers have 11 bits, matrices have 8."""

KINDS = {
    "attach-bodies": EXACT,
    "constant-shapes": EXACT,
    "eliminate-common-subexpressions": EXACT,
    "name-sanity": EXACT,
    "quantize-embedding": EIGHT_BITS,
    "quantize-weights": EIGHT_BITS,
    "remove-unused": EXACT,
    "select-logit-rows": EXACT,
    "share-initializers": EXACT,
    "stamp-versions": EXACT,
    "to-float16": HALF,
}
"""Of every pass that is not ROUNDED."""

OPTIONS = {"quantize-weights": "{bits=8}", "lower-attention": "{fold_rotary=true,max_positions=32}"}
ELSEWHERE = {
    "lengths-as-inputs": "the graph takes other inputs afterwards",
    "to-bfloat16": "onnxruntime has no bfloat16 kernels for the CPU",
}
"""Passes whose graphs cannot be run as the one before: their own tests judge them."""

NOT_FOR_EXPERTS = {
    "to-float16": "the experts' body adds up in ScatterElements, which has no float16 on the CPU",
    "quantize-weights": "a rounded router sends tokens to other experts: no tolerance fits",
}

FIRE_ALONE = {
    "written by hand": {"attach-bodies", "eliminate-common-subexpressions", "fuse-skip-norm", "remove-unused"},
    "llama": {"fold-constants", "lower-attention", "name-sanity", "quantize-weights", "stamp-versions", "to-float16"},
    "qwen3_moe": {"lower-experts"},
}

PREFIXES = [
    *((name, "fp32") for name in ("written by hand", "llama", "gemma3_text", "qwen3_moe")),
    pytest.param("qwen3", "fp32", marks=pytest.mark.slow),
    ("llama", "int8"),
    ("llama", "fp16"),
]


@cache
def exported(name: str) -> ir.Model:
    return forward_graph() if name not in FAMILIES else exported_family(name).model


def logits_of(model: ir.Model) -> np.ndarray:
    """Logits of texts in chunks, computed without onnxruntime's own rewriting; the model stays as it is."""
    complete = model.clone()
    AttachBodiesPass()(complete)
    run = session(complete, optimise=False)
    return np.concatenate([row for batch, cuts in CUTS for row in _rows(run, batch, cuts)])


def _rows(run: onnxruntime.InferenceSession, batch: int, cuts: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Logits [rows, V] of `batch` texts, sequence by sequence in each chunk."""
    names = [output.name for output in run.get_outputs()]
    inputs = {value.name: value for value in run.get_inputs()}
    # A packed graph has the rows of all sequences one after the other.
    width = 1 if "row_offsets" in inputs else batch
    pools = {
        name: np.zeros((batch, value.shape[1], ROWS, value.shape[3]), np.float16 if "16" in value.type else np.float32)
        for name, value in inputs.items()
        if "_pool." in name
    }
    ids = np.random.default_rng(batch).integers(3, 80, (batch, cuts[-1]))
    for start, end in pairwise(cuts):
        positions = np.tile(np.arange(start, end), (batch, 1))
        feeds = {
            "input_ids": ids[:, start:end].reshape(width, -1),
            "position_ids": positions.reshape(width, -1),
            "logit_rows": np.arange(positions.size // width),
            "past_lengths": np.full(batch, start, np.int32),
            "row_offsets": np.arange(batch + 1, dtype=np.int32) * (end - start),
        }
        feeds = {name: array for name, array in (feeds | pools).items() if name in inputs}
        outputs = dict(zip(names, run.run(names, feeds), strict=True))
        pools = {name: outputs[name.replace("pool.", "pool_out.")] for name in pools}
        yield from outputs["logits"]


@cache
def wanted(name: str) -> np.ndarray:
    """Of the graph before any pass."""
    return logits_of(exported(name))


def assert_near(model: ir.Model, name: str, allowed: float, after: str) -> None:
    """The same results, and axes as free as they were."""
    found, exact = logits_of(model), wanted(name)
    difference = np.abs(found - exact).max() / np.ptp(exact)
    assert difference <= allowed, f"{name} after {after}"
    before, now = axes(exported(name)), axes(model)
    assert now | before == now, f"{name} after {after}"


def axes(model: ir.Model) -> dict[str, list[str]]:
    """Of every input and output; a packed graph has slots where others have a batch, and rings a name."""
    values = (*model.graph.inputs, *model.graph.outputs)
    names = {"slots": "batch", "ring_rows_8": "max_rows"}
    return {str(value.name): [names.get(str(axis), str(axis)) for axis in value.shape] for value in values}


@pytest.mark.parametrize("pass_name", sorted(set(ALL_PASSES) - set(ELSEWHERE)))
@pytest.mark.parametrize("name", GRAPHS)
def test_a_pass_alone_keeps_what_the_graph_computes(name, pass_name):
    if name == "qwen3_moe" and pass_name in NOT_FOR_EXPERTS:
        pytest.skip(NOT_FOR_EXPERTS[pass_name])
    model = exported(name).clone()
    report = run_pipeline(model, parse_pipeline(pass_name + OPTIONS.get(pass_name, "")))
    assert report.modified or pass_name not in FIRE_ALONE.get(name, ())
    if report.modified:
        assert_near(model, name, KINDS.get(pass_name, ROUNDED), pass_name)


@pytest.mark.parametrize(("name", "precision"), PREFIXES)
def test_every_prefix_of_the_pipelines_keeps_what_the_graph_computes(name, precision):
    allowed = ROUNDED

    def check(graph_pass, model, run):
        nonlocal allowed
        allowed = max(allowed, KINDS.get(graph_pass.name, ROUNDED))
        if run.modified:
            assert_near(model, name, allowed, run.spec)

    shared = exported(name).clone()
    run_pipeline(shared, [*shared_passes(precision), *layout_passes(["ort", "native"])], check)
    for kernels in ("ort",) if precision == "fp16" else ("ort", "native"):
        run_pipeline(shared.clone(), kernel_passes(kernels, precision, ROWS), check)
