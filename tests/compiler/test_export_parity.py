"""The exported graph computes what `transformers` computes, whatever the family and however the tokens are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exported_families import (
    CUTS,
    documented_table,
    exported_family,
    family_model,
    parity,
    reference_logits,
    support_table,
)
from reference_forward import ReferenceForward
from tiny_models import BASE, FAMILIES, FULL, SLIDING, random_model, tiny_model
from transformers import CONFIG_MAPPING

from dsc.compiler.export_hf import export_model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_frameworks_in_chunks_and_batches(family):
    result = parity(exported_family(family), *reference_logits(family), CUTS)
    assert result.difference <= 1e-3
    assert result.same_argmax


@pytest.mark.parametrize("family", FAMILIES)
def test_ports_follow_the_documented_order_and_keep_symbolic_axes(family):
    exported = exported_family(family)
    layers = range(exported.info.n_layers)
    pools = [f"{role}_pool.{layer}" for layer in layers for role in "kv"]
    graph = exported.model.graph
    assert [v.name for v in graph.inputs] == ["input_ids", "position_ids", "logit_rows", "past_lengths", *pools]
    assert [v.name for v in graph.outputs] == ["logits", *(name.replace("pool", "pool_out") for name in pools)]
    shapes = {v.name: [str(axis) for axis in v.shape] for v in [*graph.inputs, *graph.outputs]}
    assert shapes["input_ids"] == ["batch", "seq"]
    assert shapes["logit_rows"] == ["rows"]
    assert shapes["logits"] == ["batch", "rows", "320"]
    for layer, kv in enumerate(exported.info.kv_layers):
        for name in ("k_pool", "v_pool", "k_pool_out", "v_pool_out"):
            assert shapes[f"{name}.{layer}"] == ["batch", str(kv.n_kv_heads), "max_rows", str(kv.head_dim)]


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_the_parameters_by_name_without_a_copy(family):
    model, graph = family_model(family), exported_family(family).model.graph
    names = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
    stored = {name for name, value in graph.initializers.items() if len(value.const_value.shape) > 1}
    assert stored == names
    if family == "llama":
        for name, parameter in model.named_parameters():
            assert graph.initializers[name].const_value.raw.data_ptr() == parameter.data_ptr()


@pytest.mark.parametrize("length", [7, 8, 9, 17])
def test_window_is_exact_at_its_edge(length):
    ids, logits = reference_logits("mistral")
    result = parity(exported_family("mistral"), ids[:, :length], logits[:, :length], (0, 3, length - 1, length))
    assert result.difference <= 1e-5


WINDOWED = {
    "phi3": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 0},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 0, "head_dim": 16},
    "starcoder2": {},
    "mixtral": {"num_local_experts": 4},
    "smollm3": {"use_sliding_window": True, "layer_types": [SLIDING, FULL], "no_rope_layers": [1, 0]},
    "cohere2": {"layer_types": [SLIDING, FULL]},
    "olmo3": {"layer_types": [SLIDING, FULL]},
    "exaone4": {"layer_types": [SLIDING, FULL]},
    "ministral": {"head_dim": 16},
}
"""Model types whose configuration has a window, each with its own way to say which layers it is for."""


@pytest.mark.parametrize("model_type", WINDOWED)
def test_a_window_in_the_configuration_is_applied(model_type):
    model = random_model(CONFIG_MAPPING[model_type](**(BASE | {"sliding_window": 8} | WINDOWED[model_type])))
    ids = torch.randint(3, 320, (1, 21), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits.numpy()
    exported = export_model(model)
    assert 8 in {layer.window for layer in exported.info.kv_layers}
    result = parity(exported, ids.numpy(), expected, (0, 6, 7, 8, 9, 21))
    assert result.difference <= 1e-4
    assert result.same_argmax


@pytest.mark.parametrize("expert", range(6))
def test_an_expert_that_no_token_reached_while_tracing_is_there(expert):
    model = tiny_model("gpt_oss", num_experts_per_tok=1)
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("router.bias")]
    assert len(biases) == 4

    def choose(number):
        for bias in biases:
            bias.data.zero_()
            bias.data[number] = 1000

    choose(0)
    exported = export_model(model)
    choose(expert)
    run = ReferenceForward(exported)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        expected = model(ids).logits.numpy()
    np.testing.assert_allclose(run(ids.numpy()), expected, atol=1e-4)


def test_only_the_rows_asked_for_reach_the_head():
    ids, logits = reference_logits("gemma2")
    got = ReferenceForward(exported_family("gemma2"), 2)(ids[:, :12], np.array([11, 4]))
    assert got.shape == (2, 2, 320)
    np.testing.assert_allclose(got, logits[:, [11, 4]], atol=1e-4)


def test_taps_are_the_layers_outputs():
    exported = export_model(tiny_model("qwen3", num_hidden_layers=3), taps=(0, 2))
    ids, _ = reference_logits("qwen3")
    run = ReferenceForward(exported, 2)
    run(ids[:, :6])
    model = tiny_model("qwen3", num_hidden_layers=3)
    seen: list[np.ndarray] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output.detach().numpy()))
    model(torch.from_numpy(ids[:, :6]))
    assert set(run.extra) == {"tap.0", "tap.2"}
    np.testing.assert_allclose(run.extra["tap.0"], seen[0], atol=1e-5)
    np.testing.assert_allclose(run.extra["tap.2"], seen[2], atol=1e-5)


def test_documented_models_are_the_measured_ones():
    assert documented_table() == support_table()
