"""Layers copied from a traced one are the layers that tracing every one gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exported_families import distinct_layers, exported_family, reference_logits
from reference_forward import ReferenceForward
from tiny_models import tiny_model

from dsc.compiler.export_hf import export_model
from dsc.compiler.export_hooks import HOOK, install_hooks
from dsc.compiler.export_probe import observe


@pytest.mark.parametrize("family", [pytest.param("gemma3_text", marks=pytest.mark.slow), "qwen3_moe", "smollm3"])
def test_stamped_equals_traced_bit_for_bit(family):
    stamped, traced = exported_family(family), export_model(tiny_model(family), stamp=False)
    assert not stamped.notes
    assert traced.notes
    ids, _ = reference_logits(family)
    got = [ReferenceForward(exported, 2)(ids[:, :24]) for exported in (stamped, traced)]
    np.testing.assert_array_equal(*got)
    names = [
        set(exported.model.graph.initializers) & set(dict(tiny_model(family).named_parameters()))
        for exported in (stamped, traced)
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("family", "n_distinct"), [("llama", 1), ("gemma3_text", 2), ("qwen3_moe", 2), ("smollm3", 2), ("gpt_oss", 2)]
)
def test_only_distinct_layers_are_traced(family, n_distinct):
    assert distinct_layers(family) == n_distinct


def _representatives(model):
    install_hooks()
    model.set_attn_implementation(HOOK)
    return observe(model, model.config, 64).representatives


def test_layer_with_other_constants_is_not_a_copy():
    model = tiny_model("llama", num_hidden_layers=4)
    model.model.layers[2].input_layernorm.variance_epsilon = 1e-3
    assert _representatives(model) == (0, 0, 2, 0)


def test_layer_that_computes_from_its_own_number_is_not_a_copy():
    model = tiny_model("llama", num_hidden_layers=3)

    class Scaled(type(model.model.layers[0].mlp)):
        def forward(self, x):
            return super().forward(x) * (1 + self.layer_idx)

    for index, layer in enumerate(model.model.layers):
        layer.mlp.__class__ = Scaled
        layer.mlp.layer_idx = index
    assert _representatives(model) == (0, 1, 2)
    ids = torch.arange(3, 15)[None]
    expected = model.eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = expected(ids).logits.numpy()
    got = ReferenceForward(export_model(model))(ids.numpy())
    np.testing.assert_allclose(got, logits, atol=1e-4)


def test_model_is_left_as_it_was():
    model = tiny_model("gemma3_text")
    layers = list(model.model.layers)
    export_model(model)
    assert list(model.model.layers) == layers
    assert not any("forward" in vars(layer) for layer in layers)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        again = model(torch.arange(3, 20)[None]).logits
        fresh = tiny_model("gemma3_text")(torch.arange(3, 20)[None]).logits
    torch.testing.assert_close(again, fresh)
