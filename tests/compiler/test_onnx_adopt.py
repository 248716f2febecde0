"""Decoders exported elsewhere: the output of the graph alone, all their data, and refusals that name what is wrong."""

from __future__ import annotations

import os
import shutil
import uuid

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from attention_lm import HEAD_DIM as POOL_HEAD_DIM
from attention_lm import N_KV_HEADS, attention_lm
from onnx import TensorProto, helper, numpy_helper
from onnx_exports import buffer_decoder, concat_decoder, dynamic_int8, greedy_by, plain_logits, save_export

from dsc.bundle_schema.container import open_bundle
from dsc.bundle_schema.errors import ModelError, RequestError
from dsc.compiler.compile import compile_bundle
from dsc.compiler.onnx_adopt import adopt_onnx
from dsc.compiler.onnx_facts import StatedFacts
from dsc.compiler.request import build_request
from dsc.compiler.sources import load_source
from dsc.compiler.tokenizer_files import tokenizer_files
from dsc.runtime import load

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 4,
    "hidden_size": 64,
    "max_position_embeddings": 200,
    "eos_token_id": [1, 2],
}
GQA = CONFIG | {"num_key_value_heads": 2}
PROMPT = [5, 6, 7, 8]
STATED = StatedFacts(max_length=128, eos_ids=(1,))
MAKERS = {"buffer": (buffer_decoder, GQA), "concat": (concat_decoder, CONFIG)}


def compile_to(output, target, **options):
    small_gate = {"n_prompts": 2, "n_tokens": 8, "n_draws": 0}
    request = build_request({"target": target, "output": output, "gate": small_gate, **options})
    return compile_bundle(request)


def greedy(bundle, n_new=24, speculation="off"):
    return list(load(bundle).generate(PROMPT, n_new, ignore_eos=True, speculation=speculation).ids)


@pytest.fixture(scope="module", params=MAKERS)
def adopted(request, tmp_path_factory):
    """An exported graph and the bundle made of it."""
    maker, config = MAKERS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    source = save_export(folder / "source", maker(), **config)
    report = compile_to(folder / "out.dsmodel", source, draft={"kind": "self", "precision": "int8"})
    return source, folder / "out.dsmodel", report


# --- what it computes


def test_an_adopted_decoder_generates_what_its_graph_computes(adopted):
    source, bundle, report = adopted
    assert report.certificate.parity is None
    assert any("not compared" in note for note in report.notes)
    plain = greedy_by(source, PROMPT, 24)
    assert greedy(bundle) == plain
    for proposer in ("self", "ngram"):
        result = load(bundle).generate(
            PROMPT, 24, ignore_eos=True, speculation={"proposer": proposer, "window": 3, "fallback": False}
        )
        assert list(result.ids) == plain
    assert greedy(bundle, speculation={"proposer": "self", "window": 6, "fallback": False}) == plain


def test_several_new_rows_follow_several_past_ones(adopted):
    source, bundle, _ = adopted
    tokens = [int(token) for token in np.random.default_rng(2).integers(0, 64, 9)]
    with open_bundle(bundle) as opened:
        pools = [spec for spec in opened.manifest.target.graphs[0].outputs if spec.name.startswith("k_pool_out")]
    assert [spec.axes[2] for spec in pools] == ["max_rows", "max_rows"]
    target = load(bundle).bundle.target
    target.read(tokens[:5])
    found = target.forward(tokens[5:], 4)
    np.testing.assert_allclose(found, plain_logits(source, tokens)[5:], rtol=0, atol=2e-3)


def test_facts_come_from_the_files_and_the_graph(adopted):
    _, bundle, _ = adopted
    with open_bundle(bundle) as opened:
        info = opened.manifest.target.info
    assert (info.architecture, info.model_type, info.n_heads, info.hidden_size) == ("LlamaForCausalLM", "llama", 4, 64)
    assert (info.vocab_size, info.max_length, info.eos_ids, info.n_layers) == (64, 200, (1, 2), 2)
    assert {layer.head_dim for layer in info.kv_layers} == {16}


def test_a_graph_of_the_project_s_own_convention_is_taken_as_it_is(tmp_path):
    model = attention_lm(3, vocab=64, window=8)
    source = save_export(tmp_path / "source", model, lambda index, name: f"{index}.bin")
    session = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    tokens = list(PROMPT)
    for _ in range(24):
        pool = np.zeros((1, N_KV_HEADS, 64, POOL_HEAD_DIM), np.float32)
        feeds = {"input_ids": [tokens], "logit_rows": [len(tokens) - 1], "k_pool.0": pool, "v_pool.0": pool}
        feeds = {name: np.asarray(value) for name, value in feeds.items()}
        logits = session.run(["logits"], feeds | {"past_lengths": np.zeros(1, np.int32)})[0]
        tokens.append(int(logits[0, 0].argmax()))
    compile_to(tmp_path / "out.dsmodel", source, max_length=100, eos_ids=[1])
    assert greedy(tmp_path / "out.dsmodel") == tokens[4:]
    info = load(tmp_path / "out.dsmodel").bundle.manifest.target.info
    assert (info.max_length, info.kv_layers[0].window, info.eos_ids) == (100, 8, (1,))


def test_a_graph_taken_out_of_a_bundle_becomes_a_bundle_again(tiny_bundle, tmp_path):
    from dsc.compiler.bundle_tools import extract_graph

    bundle = shutil.copy(tiny_bundle, tmp_path / "model.dsmodel")
    graph = extract_graph(bundle, "target", None)
    compile_to(tmp_path / "again.dsmodel", graph, eos_ids=[1], max_length=512)
    assert greedy(tmp_path / "again.dsmodel") == greedy(tiny_bundle)


def test_half_precision_keeps_its_form_and_is_not_quantised(tmp_path):
    model = buffer_decoder()
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    source = save_export(tmp_path / "source", model, **GQA)
    compile_to(tmp_path / "out.dsmodel", source)
    info = load(tmp_path / "out.dsmodel").bundle.manifest.target.info
    assert (info.quantization, info.kv_dtype) == ("adopted: float16", "float16")
    assert len(greedy(tmp_path / "out.dsmodel")) == 24
    with pytest.raises(RequestError, match="float32 is required for int8"):
        compile_to(tmp_path / "int8.dsmodel", source, weights={"precision": "int8"})


# --- its data, whatever the files are called


def with_attribute_tensor(model):
    """The head as a Constant node's tensor, and the same graph otherwise."""
    head = next(tensor for tensor in model.graph.initializer if tensor.name == "head.weight")
    model.graph.initializer.remove(head)
    model.graph.node.insert(0, helper.make_node("Constant", [], ["head.weight"], value=head))
    return model


def test_every_data_file_is_collected_and_the_bundle_needs_none_of_them(tmp_path, monkeypatch):
    source = save_export(
        tmp_path / "source",
        with_attribute_tensor(concat_decoder()),
        lambda index, name: str(uuid.UUID(int=index)) if index % 2 else f"{name}.weight",
        **CONFIG,
    )
    assert len(list(source.parent.iterdir())) > 8
    plain = greedy_by(source, PROMPT, 24)
    monkeypatch.chdir(tmp_path)
    compile_to(tmp_path / "out.dsmodel", source.relative_to(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(tmp_path / "out.dsmodel", tmp_path / "elsewhere" / "moved.dsmodel")
    shutil.rmtree(source.parent)
    monkeypatch.chdir("/")
    assert greedy(moved) == plain


def test_a_snapshot_of_a_cache_whose_files_are_links_is_read(tmp_path, monkeypatch):
    source = save_export(tmp_path / "plain", concat_decoder(), **CONFIG)
    snapshot = tmp_path / "models--x--y" / "snapshots" / "0123"
    blobs = tmp_path / "models--x--y" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, file in enumerate(sorted(source.parent.iterdir())):
        shutil.move(file, blobs / f"blob{index}")
        (snapshot / file.name).symlink_to(os.path.join("..", "..", "blobs", f"blob{index}"))
    monkeypatch.chdir("/")
    model = adopt_onnx(snapshot / "model.onnx").model
    assert model.graph.initializers["embed.weight"].const_value.numpy().shape == (64, 64)


def outside(tmp_path, folder, tensor):
    return "../secret.bin"


def absolute(tmp_path, folder, tensor):
    return str(tmp_path / "secret.bin")


def link(tmp_path, folder, tensor):
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    return "link.bin"


def hard_link(tmp_path, folder, tensor):
    (folder / "hard.bin").hardlink_to(tmp_path / "secret.bin")
    return "hard.bin"


def missing(tmp_path, folder, tensor):
    return "nothing.bin"


def folder_itself(tmp_path, folder, tensor):
    return "."


def pipe(tmp_path, folder, tensor):
    os.mkfifo(folder / "pipe.bin")
    return "pipe.bin"


def truncated(tmp_path, folder, tensor):
    (folder / "short.bin").write_bytes(b"\0" * 100)
    return "short.bin"


@pytest.mark.parametrize("in_attribute", [False, True])
@pytest.mark.parametrize(
    ("place", "says"),
    [
        (outside, "inside the model's folder"),
        (absolute, "inside the model's folder"),
        (link, "a link out of it"),
        (hard_link, "hard links"),
        (missing, "'nothing.bin' is required"),
        (folder_itself, "regular file"),
        (pipe, "regular file"),
        (truncated, "the file has 100"),
    ],
)
def test_data_elsewhere_or_not_whole_is_refused_with_the_tensor_s_name(tmp_path, place, says, in_attribute):
    (tmp_path / "secret.bin").write_bytes(b"\0" * (1 << 20))
    model = with_attribute_tensor(buffer_decoder()) if in_attribute else buffer_decoder()
    source = save_export(tmp_path / "source", model, **GQA)
    tensors = [a.t for node in model.graph.node for a in node.attribute if a.t.name == "head.weight"]
    tensor = next(t for t in (*tensors, *model.graph.initializer) if t.name == "head.weight")
    entry = next(entry for entry in tensor.external_data if entry.key == "location")
    entry.value = place(tmp_path, source.parent, tensor)
    next(entry for entry in tensor.external_data if entry.key == "offset").value = "0"
    source.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"tensor 'head.weight'.*" + says):
        compile_to(tmp_path / "out.dsmodel", source)
    assert not (tmp_path / "out.dsmodel").exists()


@pytest.mark.parametrize(("key", "value"), [("length", "12"), ("offset", "-4"), ("offset", "many")])
def test_impossible_extents_are_refused(tmp_path, key, value):
    model = buffer_decoder()
    source = save_export(tmp_path / "source", model, **GQA)
    next(entry for entry in model.graph.initializer[0].external_data if entry.key == key).value = value
    source.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"model\.onnx"):
        adopt_onnx(source)


# --- what is no decoder that can be adopted


def rename_input(old, new):
    def change(model):
        next(value for value in model.graph.input if value.name == old).name = new
        for node in model.graph.node:
            node.input[:] = [new if name == old else name for name in node.input]

    return change


def drop_output(model):
    model.graph.output.remove(next(value for value in model.graph.output if value.name == "present.1.value"))


def old_opset(model):
    model.opset_import[0].version = 13


def fixed_batch(model):
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4


def reordered_cache(model):
    """A cache that is gathered anew, as for beam search, before the new rows are appended."""
    concat = next(node for node in model.graph.node if node.op_type == "Concat")
    index = list(model.graph.node).index(concat)
    model.graph.node.insert(index, helper.make_node("Identity", [concat.input[0]], ["reordered"]))
    concat.input[0] = "reordered"


def int_ids(model):
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT32


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (rename_input("position_ids", "token_type_ids"), "input 'token_type_ids'"),
        (rename_input("past_key_values.0.key", "cache"), "a key-value cache is required"),
        (drop_output, "'present.1.value' is required"),
        (old_opset, "opset 18 or newer is required, got 13"),
        (fixed_batch, "input 'input_ids'"),
        (reordered_cache, r"output 'present.0.key'.*made by Concat"),
        (int_ids, "INT64 with 2 axes is required"),
        (dynamic_int8, "'to_int8': DynamicQuantizeLinear scales activations over the whole tensor"),
    ],
)
def test_what_cannot_be_wrapped_exactly_is_refused_by_name(tmp_path, change, says):
    model = concat_decoder()
    change(model)
    with pytest.raises(ModelError, match=says):
        adopt_onnx(save_export(tmp_path / "source", model, **CONFIG))


@pytest.mark.parametrize(
    ("absent", "stated", "says"),
    [
        ("max_position_embeddings", StatedFacts(), "maximum length must be stated"),
        ("eos_token_id", StatedFacts(), "end a text must be stated"),
        ("num_attention_heads", STATED, "num_attention_heads must be known"),
    ],
)
def test_what_nothing_states_is_asked_for(tmp_path, absent, stated, says):
    config = {key: value for key, value in CONFIG.items() if key != absent}
    source = save_export(tmp_path / "source", concat_decoder(), **config)
    with pytest.raises(ModelError, match=says):
        adopt_onnx(source, stated)


def test_what_the_user_states_stands_in_for_the_files(tmp_path):
    config = {key: CONFIG[key] for key in ("num_attention_heads",)}
    info = adopt_onnx(save_export(tmp_path / "source", concat_decoder(), **config), STATED).info
    assert (info.max_length, info.eos_ids, info.hidden_size, info.architecture) == (128, (1,), 64, "OnnxDecoder")


def test_a_rotary_table_limits_the_length(tmp_path):
    source = save_export(tmp_path / "source", buffer_decoder(), **(GQA | {"max_position_embeddings": 4096}))
    assert adopt_onnx(source).info.max_length == 256


def test_files_that_are_no_model_are_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(ModelError, match="ONNX model is required"):
        load_source(tmp_path / "model.onnx")
    (tmp_path / "second.onnx").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model\.onnx, second\.onnx"):
        load_source(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        adopt_onnx(tmp_path / "model.onnx")


def test_a_directory_with_one_graph_and_its_tokenizer_is_a_model(tmp_path):
    from tiny_models import write_tokenizer

    source = save_export(tmp_path / "source", buffer_decoder(vocab=320), **GQA)
    write_tokenizer(source.parent)
    adopted = load_source(source.parent).export()
    assert "tokenizer.json" in adopted.tokenizer
    assert tokenizer_files(source) == adopted.tokenizer
    assert adopted.info.name == "source"
    compile_to(tmp_path / "out.dsmodel", source.parent, draft={"kind": "none"})
    assert load(tmp_path / "out.dsmodel").generate("the cat", 4, ignore_eos=True).text


def test_a_dry_run_describes_the_graph(tmp_path):
    from dsc.compiler.dry_run import dry_run_report

    source = save_export(tmp_path / "source", buffer_decoder(), **GQA)
    report = dry_run_report(build_request({"target": source, "output": tmp_path / "out.dsmodel"}))
    assert report["target"]["layers"] == 2
    assert report["target"]["KV bytes per token"] == 2 * 2 * 2 * 16 * 4
    assert report["target"]["max length"] == 200


def test_end_tokens_are_stated_for_graphs_only(tiny_source):
    with pytest.raises(RequestError, match="eos_ids"):
        load_source(tiny_source, StatedFacts(eos_ids=(1,)))


def test_constants_among_the_inputs_of_an_older_graph_are_constants(tmp_path):
    model = concat_decoder()
    head = next(tensor for tensor in model.graph.initializer if tensor.name == "head.weight")
    model.graph.input.append(helper.make_tensor_value_info(head.name, onnx.TensorProto.FLOAT, head.dims))
    adopted = adopt_onnx(save_export(tmp_path / "source", model, **CONFIG))
    assert "head.weight" not in {value.name for value in adopted.model.graph.inputs}
