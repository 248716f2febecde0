"""What other exporters freeze or stamp differently: lengths of caches, versions newer than the runtime's."""

from __future__ import annotations

import pytest
from onnx_exports import HEAD_DIM, buffer_decoder, concat_decoder, greedy_by, save_export

from dsc.bundle_schema.container import open_bundle
from dsc.bundle_schema.errors import PassError
from dsc.compiler.compile import compile_bundle
from dsc.compiler.onnx_adopt import adopt_onnx
from dsc.compiler.request import build_request
from dsc.runtime import load

CONFIG = {"num_attention_heads": 4, "hidden_size": 64, "max_position_embeddings": 200, "eos_token_id": 1}
MAKERS = {"buffer": (buffer_decoder, CONFIG | {"num_key_value_heads": 2}), "concat": (concat_decoder, CONFIG)}
PROMPT = [5, 6, 7, 8]


@pytest.fixture(params=MAKERS)
def decoder(request):
    """A graph and its configuration."""
    maker, config = MAKERS[request.param]
    return maker(), config


def decoder_of(config):
    return next(maker() for maker, own in MAKERS.values() if own is config)


def caches(model):
    """The axes of rows of past and present keys and values."""
    values = [v for v in (*model.graph.input, *model.graph.output) if v.name.startswith(("past_key", "present"))]
    return {value.name: value.type.tensor_type.shape.dim[2] for value in values}


def test_pools_have_free_rows_whatever_the_exporter_called_them(decoder, tmp_path):
    model, config = decoder
    for name, axis in caches(model).items():
        axis.dim_param = "past_sequence_length" if name.startswith("past") else "past_sequence_length + 1"
    graph = adopt_onnx(save_export(tmp_path, model, **config)).model.graph
    shapes = {str(v.name): [str(dim) for dim in v.shape] for v in (*graph.inputs, *graph.outputs)}
    pools = [name for name in shapes if "_pool" in name]
    assert len(pools) == 8
    for name in pools:
        assert shapes[name] == shapes[name.replace("_out", "")]
        assert shapes[name][2:] == ["max_rows", str(HEAD_DIM)]


@pytest.mark.parametrize(("ir_version", "opset", "stamped"), [(9, None, 10), (14, None, 10), (13, 26, 13)])
def test_versions_are_the_lowest_and_lengths_are_free_whatever_the_exporter_wrote(
    decoder, tmp_path, ir_version, opset, stamped
):
    """Past keys and values are declared to have 7 rows, present ones 8; the bundle has what the plan gives it."""
    model, config = decoder
    model.ir_version = ir_version
    model.opset_import[0].version = opset or model.opset_import[0].version
    for name, axis in caches(model).items():
        axis.Clear()
        axis.dim_value = 7 + name.startswith("present")
    source = save_export(tmp_path / "source", model, **config)
    gate = {"n_prompts": 1, "n_tokens": 8, "n_draws": 0}
    compile_bundle(build_request({"target": source, "output": tmp_path / "out.dsmodel", "gate": gate}))
    with open_bundle(tmp_path / "out.dsmodel") as bundle:
        assert {graph.ir_version for graph in bundle.manifest.target.graphs if graph.role == "forward"} == {stamped}
        assert bundle.manifest.requires.ir_version == stamped
    found = load(tmp_path / "out.dsmodel").generate(PROMPT, 24, ignore_eos=True, speculation="off").ids
    plain = save_export(tmp_path / "plain", decoder_of(config))
    assert list(found) == greedy_by(plain, PROMPT, 24)


def test_operators_newer_than_the_oldest_onnxruntime_has_are_refused(tmp_path):
    model = concat_decoder()
    model.opset_import[0].version = 27
    source = save_export(tmp_path, model, **CONFIG)
    with pytest.raises(PassError, match=r"at most 26 for onnxruntime 1\.31, got 27"):
        compile_bundle(build_request({"target": source, "output": tmp_path / "out.dsmodel"}))
