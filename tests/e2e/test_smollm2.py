"""A real model from its GGUF file to text: one compile, and what a user may expect of the bundle."""

from __future__ import annotations

import os
import shutil

import gguf
import numpy as np
import onnx
import pytest
from bundle_size import size_over_tensors
from real_models import smollm2_gguf

from dsc.bundle_schema.container import open_bundle
from dsc.kernels.interleave import separate_codes, separate_factors
from dsc.runtime import load

# Prompts whose answers repeat what was said, so that lookups are proposed and accepted, and one that does not repeat.
QUOTE = "Repeat exactly: the quick brown fox jumps over the lazy dog. the quick brown fox"
COUNT = "Write the numbers from one to ten, one on each line."
CAPITAL = "Name the capital city of France."
LOOP = "one two three four one two three four one two three"


def chat(text):
    return [{"role": "user", "content": text}]


def lookup(window):
    return {"proposer": "ngram", "window": window, "fallback": False}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The weights as the file has them, prompt lookup as draft, the smallest gate."""
    from dsc.compiler.compile import compile_bundle
    from dsc.compiler.request import build_request

    source = smollm2_gguf()
    output = tmp_path_factory.mktemp("smollm2") / "smollm2.dsmodel"
    gate = {"n_prompts": 2, "n_tokens": 16, "n_draws": 0}
    compile_bundle(build_request({"target": source, "output": output, "gate": gate, "threads": 2}))
    return output


@pytest.fixture(scope="module")
def model(bundle):
    return load(bundle, threads=2)


# --- text


def test_a_repeated_prompt_is_neither_read_nor_drafted_anew(bundle):
    model = load(bundle, threads=2)
    model.update_config({"cache.reuse_prefixes": True, "proposers.cache.enabled": True})
    prompt = "\n".join(["Rivers that flow to the north are rare.", QUOTE, COUNT] * 11)
    first = model.generate(prompt, 24, ignore_eos=True)
    by_cache = {"proposer": "cache", "window": 4, "fallback": False}
    again = model.generate(prompt, 24, ignore_eos=True, speculation=by_cache)
    assert first.stats.prompt_tokens > 400
    assert again.ids == first.ids
    assert again.stats.cached_tokens == first.stats.prompt_tokens - 1
    assert again.stats.proposers["cache"].accepted == again.stats.proposers["cache"].proposed > 10


def test_the_text_makes_sense(model):
    assert model.generate("The capital of France is", 1).text == " Paris"
    answer = model.generate(chat(CAPITAL), 20)
    assert answer.text == "The capital city of France is Paris."
    assert answer.finish_reason == "stop"
    assert answer.ids[-1] in model.bundle.manifest.target.info.eos_ids


def test_the_chat_template_is_the_models_own(model):
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    rest = f"<|im_start|>user\n{CAPITAL}<|im_end|>\n<|im_start|>assistant\n"
    assert model.bundle.codec.render(chat(CAPITAL)) == system + rest
    assert model.bundle.codec.decode(model.encode(chat(CAPITAL)), skip_special_tokens=False) == system + rest


def test_a_stream_is_the_text_in_pieces(model):
    stream = model.stream(chat("Say something in French, with accents."), 40)
    pieces = [str(chunk) for chunk in stream]
    assert "".join(pieces) == stream.result.text == model.bundle.codec.decode(stream.result.ids)
    assert len(pieces) > 3
    assert "\N{REPLACEMENT CHARACTER}" not in stream.result.text


def test_a_stop_string_in_the_middle_of_a_block_cuts_there(model):
    whole = model.generate(chat(QUOTE), 40, speculation="off")
    assert "jumps over" in whole.text
    cut_inside_blocks = 0
    for window in range(1, 9):
        result = model.generate(chat(QUOTE), 40, stop="jumps over", speculation=lookup(window))
        assert result.text == whole.text[: whole.text.index("jumps over")]
        assert result.ids == whole.ids[: len(result.ids)]
        cut_inside_blocks += result.stats.discarded > 0
        # what was cut leaves no trace in the caches
        prompt = [*result.prompt_ids, *result.ids]
        more = model.stream(prompt, 10, reuse_cache=True).finish()
        assert more.ids == whole.ids[len(result.ids) :][:10]
    assert cut_inside_blocks > 0


def test_a_displaced_prompt_is_put_back_and_continued_alike(model):
    model.reset()
    fresh = model.generate(chat(QUOTE), 24)
    model.generate(chat(QUOTE), 1, reuse_cache=True)
    other = model.generate("Rivers that flow to the north are", 8, reuse_cache=True)
    again = model.generate(chat(QUOTE), 24, reuse_cache=True)
    assert again.stats.restored_tokens == len(again.prompt_ids) - 1
    assert again.ids == fresh.ids
    assert other.stats.restored_tokens == 0


# --- speculation


@pytest.mark.parametrize("window", range(1, 9))
def test_greedy_output_is_plain_decodings_at_every_window(model, window):
    accepted = 0
    for prompt in (chat(QUOTE), chat(COUNT), LOOP):
        plain = model.generate(prompt, 24, speculation="off")
        fast = model.generate(prompt, 24, speculation=lookup(window))
        assert fast.ids == plain.ids
        accepted += fast.stats.accepted
    assert accepted > 0


def test_the_default_is_plain_decodings_output_too(model):
    for prompt in (QUOTE, COUNT, CAPITAL):
        assert model.generate(chat(prompt), 32).ids == model.generate(chat(prompt), 32, speculation="off").ids


def test_sequences_of_an_engine_are_what_each_is_alone(model):
    sampled = {"sampling": {"temperature": 0.8, "top_p": 0.95}, "seed": 5}
    requests = [
        (chat(QUOTE), {}),
        (chat(COUNT), {"speculation": "off"}),
        (LOOP, {"speculation": lookup(4)}),
        (chat(CAPITAL), sampled),
        (model.encode("\n".join([QUOTE, COUNT, LOOP] * 12)), {"speculation": lookup(8)}),
    ]
    wanted = [model.generate(prompt, 24, **options).ids for prompt, options in requests]
    with model.engine(slots=4) as engine:
        tickets = [engine.submit(prompt, max_new_tokens=24, **options) for prompt, options in requests]
        assert [ticket.result().ids for ticket in tickets] == wanted
    stats = engine.stats()
    assert stats["most_sequences"] == 4
    assert stats["forwards"] == stats["rounds"]
    assert tickets[0].stats.sharing == "packed rows"


def test_a_seed_fixes_sampled_output_whatever_was_drafted(model):
    sampling = {"temperature": 0.8, "top_p": 0.95}
    runs = {
        seed: {model.generate(LOOP, 16, sampling, seed=seed, speculation=how).ids for how in ("off", "auto", lookup(6))}
        for seed in range(4)
    }
    assert all(len(outputs) == 1 for outputs in runs.values())
    assert len(set.union(*runs.values())) > 1


def test_the_first_three_tokens_have_the_plain_distribution(model):
    """Counts of 150 sampled runs with drafts against 150 other ones without: Pearson's statistic of two samples."""
    sampling = {"temperature": 1.0, "top_p": 0.9}
    n_runs, proposed = 150, 0
    rows = {how: np.empty((n_runs, 3), int) for how in ("off", "draft")}
    model.generate(LOOP, 1)
    for how, tokens in rows.items():
        for run in range(n_runs):
            seed = run if how == "off" else run + n_runs
            speculation = "off" if how == "off" else lookup(4)
            options = {"sampling": sampling, "seed": seed, "speculation": speculation, "ignore_eos": True}
            result = model.stream(LOOP, 3, reuse_cache=True, **options).finish()
            tokens[run] = result.ids
            proposed += result.stats.proposed
    assert proposed > n_runs
    for position in range(3):
        assert_same_distribution(rows["off"][:, position], rows["draft"][:, position])


def assert_same_distribution(first, second):
    """Pearson's statistic of two samples of one size, rare tokens together, within 5 deviations of its mean."""
    tokens, index = np.unique(np.concatenate([first, second]), return_inverse=True)
    counts = np.stack([np.bincount(part, minlength=len(tokens)) for part in np.split(index, 2)])
    rare = counts.sum(0) < 10
    counts = np.concatenate([counts[:, ~rare], counts[:, rare].sum(1, keepdims=True)], axis=1)
    counts = counts[:, counts.sum(0) > 0]
    statistic = float(((counts[0] - counts[1]) ** 2 / counts.sum(0)).sum())
    freedom = counts.shape[1] - 1
    assert statistic <= freedom + 5 * np.sqrt(2 * max(freedom, 1))


# --- turns and sessions


def test_turns_are_fresh_runs_on_all_messages(model):
    conversation = model.conversation()
    for text in (CAPITAL, "And of Germany?", "Thank you!"):
        before = list(conversation.messages)
        answer = conversation.send(text, max_new_tokens=16)
        fresh = model.generate([*before, *chat(text)], 16, speculation="off")
        assert answer.ids == fresh.ids
        assert conversation.messages[-1]["content"] == fresh.text


def test_only_what_is_new_of_a_turn_is_read(model):
    conversation = model.conversation()
    first = conversation.send(CAPITAL, max_new_tokens=16)
    second = conversation.send("And of Germany?", max_new_tokens=4)
    assert second.stats.cached_tokens >= len(first.prompt_ids) + len(first.ids) - 2


def test_two_sessions_of_one_bundle_do_not_disturb_each_other(model, bundle):
    other = load(bundle, threads=1)
    wanted = [model.generate(chat(text), 24, speculation="off").ids for text in (QUOTE, COUNT)]
    streams = [model.stream(chat(QUOTE), 24), other.stream(chat(COUNT), 24)]
    found: list[list[int]] = [[], []]
    open_streams = [0, 1]
    while open_streams:
        for i in list(open_streams):
            chunk = next(streams[i], None)
            if chunk is None:
                open_streams.remove(i)
            else:
                found[i] += chunk.ids
    assert [tuple(ids) for ids in found] == wanted


# --- the file


def test_a_moved_and_renamed_bundle_runs_from_another_folder(model, bundle, tmp_path, monkeypatch):
    place = tmp_path / "ein anderer Ordner" / "ünder another name.dsmodel"
    place.parent.mkdir()
    os.link(bundle, place)
    monkeypatch.chdir("/")
    moved = load(place, threads=2)
    assert moved.generate(chat(CAPITAL), 8).ids == model.generate(chat(CAPITAL), 8).ids


def test_a_damaged_bundle_is_refused_by_the_member(bundle, tmp_path):
    from dsc.bundle_schema.bundle_errors import ChecksumMismatch

    damaged = shutil.copy(bundle, tmp_path / "damaged.dsmodel")
    with open_bundle(bundle) as opened:
        weight = max(opened.manifest.members, key=lambda member: member.nbytes)
    with open(damaged, "r+b") as file:
        file.seek(weight.offset + weight.nbytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ChecksumMismatch, match=weight.name):
        load(damaged)


def test_the_certificate_says_what_was_measured(model):
    certificate = model.bundle.certificate
    assert certificate.verdict == "pass"
    assert all(not check.mismatches for check in certificate.greedy)
    assert certificate.rows is not None
    if certificate.kernels == "native":
        assert certificate.rows.bit_equal
    assert certificate.finite is not None
    assert certificate.finite.n_not_finite == 0


def test_the_file_adds_less_than_a_fiftieth_to_its_tensors(bundle):
    share, members = size_over_tensors(bundle)
    print(f"{share:.2%} over the tensors")
    assert 0 < share < 0.02
    assert "tokenizer/merges.bin" not in members


def test_the_weights_are_those_of_the_file(bundle):
    """Every matrix of the native graph against the library's own dequantisation of the same tensors."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf()).tensors}
    with open_bundle(bundle) as opened:
        graph = onnx.load_from_string(opened.read("target/graph.native.onnx")).graph
        initializers = {tensor.name: array_of(tensor, opened.map) for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type.startswith("InterleavedMatMul")]
    assert len(products) == 30 * 4 + 1
    for node in products:
        wanted = np.concatenate([dequantised(tensors[name]) for name in tensors_of(node.input[1])])
        n, (qweight, *factors) = len(wanted), [initializers[name] for name in node.input[1:4]]
        scales, *mins = [separate_factors(values, n) for values in factors]
        found = dequantise(separate_codes(qweight, n), scales, mins[0] if mins else None)
        np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max(), rtol=0)


def array_of(tensor, mapped):
    """The values of an initializer, also of one that lies in the bundle."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return onnx.numpy_helper.to_array(tensor)
    place = {item.key: item.value for item in tensor.external_data}
    start, length = int(place["offset"]), int(place["length"])
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.frombuffer(mapped[start : start + length], dtype).reshape(tuple(tensor.dims))


def tensors_of(name):
    """The file's tensors behind a matrix of the graph; merged products have several, one below the other."""
    if name.startswith("model.embed_tokens"):
        return ["token_embd.weight"]
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    parts = {
        "self_attn.qkv_proj": ("attn_q", "attn_k", "attn_v"),
        "self_attn.o_proj": ("attn_output",),
        "mlp.gate_up_proj": ("ffn_gate", "ffn_up"),
        "mlp.down_proj": ("ffn_down",),
    }
    chosen = next(names for key, names in parts.items() if part.startswith(key))
    return [f"blk.{layer}.{tensor}.weight" for tensor in chosen]


def dequantised(tensor):
    """[N, K]; the file has the rows of queries and keys interleaved for its own rotary embedding."""
    weight = gguf.dequantize(tensor.data, tensor.tensor_type)
    if not tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        return weight
    n_heads = 9 if tensor.name.endswith("attn_q.weight") else 3
    pairs = weight.reshape(n_heads, weight.shape[0] // n_heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def dequantise(qweight, scales, mins):
    """scale (q - 2^(bits-1)) + min; at 4 bits the even element is the low nibble."""
    bits = 4 if qweight.shape[-1] == 16 else 8
    codes = qweight if bits == 8 else np.stack([qweight & 15, qweight >> 4], -1).reshape(*qweight.shape[:-1], 32)
    weight = (codes.astype(np.float64) - 2 ** (bits - 1)) * scales.reshape(*codes.shape[:-1], 1)
    if mins is not None:
        weight += mins.reshape(*codes.shape[:-1], 1)
    return weight.reshape(codes.shape[0], -1)


# --- kernels


def test_onnxruntimes_kernels_compute_the_same_model(model, bundle):
    """Activations are rounded differently, so logits are near and the text is as sensible."""
    if model.bundle.settings.kernels != "native":
        pytest.skip("the native CPU library was not built here")
    other = load(bundle, threads=2, kernels="ort")
    assert other.bundle.settings.kernels == "ort"
    assert other.generate("The capital of France is", 1).text == " Paris"
    ids = model.encode(chat(CAPITAL))
    ours, theirs = (last_logits(loaded, ids, 16) for loaded in (model, other))
    assert np.sqrt(((ours - theirs) ** 2).mean()) < 0.02 * np.ptp(ours)
    assert (ours.argmax(1) == theirs.argmax(1)).mean() >= 0.75


def last_logits(loaded, ids, n_rows):
    target = loaded.bundle.target
    loaded.reset()
    target.read(ids[:-n_rows])
    logits = target.forward(ids[-n_rows:], n_rows).copy()
    target.rewind(0)
    return logits
