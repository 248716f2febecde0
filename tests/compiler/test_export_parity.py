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
from tiny_models import FAMILIES, tiny_model

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
        expected = ["batch", str(kv.n_kv_heads), "max_rows", str(kv.head_dim)]
        assert shapes[f"k_pool.{layer}"] == shapes[f"v_pool_out.{layer}"] == expected


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
