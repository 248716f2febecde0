"""Checkpoints whose floats fit 16 bits: held so in an fp32 bundle, with what the model says unchanged."""

from __future__ import annotations

import shutil

import pytest
import torch
from tiny_models import save_dir, tiny_model

from dsc.bundle_schema.container import open_bundle
from dsc.compiler.bundle_tools import extract_graph
from dsc.compiler.compile import compile_bundle
from dsc.compiler.request import build_request
from dsc.runtime import load

PROMPT = [5, 9, 17, 5, 9, 17, 44, 200]
KINDS = ["bfloat16", "int16"]


@torch.no_grad()
def rounded(kind):
    """A tiny model whose matrices are bfloat16, or 8-bit blocks, and nothing finer."""
    model = tiny_model("llama", seed=4, hidden_size=64, intermediate_size=96, tie_word_embeddings=True)
    for weight in model.parameters():
        if weight.ndim == 1:
            continue
        if kind == "bfloat16":
            weight.copy_(weight.bfloat16())
        else:
            blocks = weight.reshape(-1, 32)
            scale = (blocks.abs().amax(1, keepdim=True) / 127).half().float()
            weight.copy_((torch.round(blocks / scale) * scale).reshape(weight.shape))
    return model


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    """The kind, the model, and its fp32 bundle."""
    folder = tmp_path_factory.mktemp(request.param)
    model = rounded(request.param)
    source, bundle = save_dir(folder / "model", model), folder / "model.dsmodel"
    compile_bundle(build_request({"target": source, "output": bundle, "weights": {"precision": "fp32"}}))
    return request.param, model, bundle


def matrices(path):
    """Element types of the tensors that products read."""
    with open_bundle(path) as bundle:
        return {str(tensor.dtype) for tensor in bundle.weights() if "proj" in tensor.users_text}


def test_the_bundle_holds_16_bits_and_says_what_the_floats_say(made):
    kind, model, path = made
    assert matrices(path) == ({"bfloat16"} if kind == "bfloat16" else {"int16", "float32"})  # codes, and scales
    wanted = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)[0, len(PROMPT) :].tolist()
    found = load(path).generate(PROMPT, 24, ignore_eos=True)
    assert list(found.ids)[: len(wanted)] == wanted
    assert found.stats.kernels == "native" or "native" in found.stats.kernels_reason


def test_a_graph_taken_out_has_its_floats_back(made, tmp_path):
    *_, path = made
    extract_graph(path, "target", None)
    (graph,) = path.parent.glob("*.onnx")
    folder = graph.parent
    for file in (folder / "model").iterdir():
        if not file.name.endswith(".safetensors"):
            shutil.copy(file, folder / file.name)
    again = tmp_path / "again.dsmodel"
    compile_bundle(build_request({"target": graph, "output": again, "weights": {"precision": "int8"}}))
    assert matrices(again) == {"uint8", "float32"}
    assert load(again).generate(PROMPT, 8, ignore_eos=True).ids
