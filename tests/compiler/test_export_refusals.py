"""What cannot be expressed exactly is refused by name, with the reason."""

from __future__ import annotations

import pytest
import torch
from tiny_models import BASE, random_model, tiny_model
from transformers import CONFIG_MAPPING

from dsc.bundle_schema.errors import ModelError
from dsc.compiler.export_experts import GateForm, gate_form
from dsc.compiler.export_hf import export_model
from dsc.compiler.export_hooks import HOOK, install_hooks
from dsc.compiler.export_masks import CausalMask, causal_mask


def _model(model_type, **fields):
    return random_model(CONFIG_MAPPING[model_type](**(BASE | fields)))


def test_state_space_layers_are_named():
    with pytest.raises(ModelError, match=r"MambaForCausalLM: attention must go through .*AttentionInterface"):
        export_model(_model("mamba", state_size=4))


def test_hybrid_layers_are_named():
    model = _model("lfm2", layer_types=["conv", "full_attention"])
    with pytest.raises(ModelError, match=r"layer 0: each layer must call the attention hook .*Lfm2ShortConv"):
        export_model(model)


def test_older_attention_classes_are_named():
    with pytest.raises(ModelError, match="BloomForCausalLM: attention must go through"):
        export_model(_model("bloom", n_head=4, n_layer=2))


def test_chunked_attention_is_refused():
    model = _model("llama4_text", head_dim=16, num_local_experts=2, intermediate_size_mlp=96, attention_chunk_size=8)
    with pytest.raises(ModelError, match="attention must be causal"):
        export_model(model)


def test_bidirectional_attention_is_refused():
    model = tiny_model("llama")
    model.config.is_causal = False
    with pytest.raises(ModelError, match="attention must be causal"):
        export_model(model)


def test_encoder_decoder_is_refused():
    model = tiny_model("llama")
    model.config.is_encoder_decoder = True
    with pytest.raises(ModelError, match="is an encoder-decoder"):
        export_model(model)


def test_tap_of_a_layer_that_does_not_exist():
    with pytest.raises(ModelError, match="a tap must be a layer from 0 to 1, got 2"):
        export_model(tiny_model("llama"), taps=(2,))


@pytest.mark.parametrize("window", [1, 2, 8, 63])
def test_window_is_read_from_the_mask(window):
    assert causal_mask(lambda b, h, q, k: (k <= q) & (k > q - window), 64, "x") == CausalMask(window)


def test_full_mask_has_no_window():
    assert causal_mask(lambda b, h, q, k: k <= q, 64, "x") == CausalMask(None)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: k == k,
        lambda b, h, q, k: (k <= q) & (k // 8 == q // 8),
        lambda b, h, q, k: (k <= q) | (k < 5),
        lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k < 2)),
    ],
    ids=["bidirectional", "chunked", "prefix", "window with first tokens"],
)
def test_other_masks_are_refused(mask):
    with pytest.raises(ModelError, match="attention must be causal"):
        causal_mask(mask, 64, "x")


class _Experts(torch.nn.Module):
    has_gate, has_bias, has_post_expert_norm, is_transposed = True, False, False, False

    def __init__(self, gate):
        super().__init__()
        self._apply_gate = gate


def test_gating_is_recognised_by_its_values():
    silu = torch.nn.functional.silu
    assert gate_form(_Experts(lambda x: silu(x[..., ::2]) * x[..., 1::2])) == GateForm("silu", True, True)
    assert gate_form(_Experts(lambda x: silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1])) == GateForm("silu")


def test_unknown_gating_is_refused():
    with pytest.raises(ModelError, match="_Experts: the experts' gating is none of silu"):
        gate_form(_Experts(lambda x: x.chunk(2, -1)[0].sin() * x.chunk(2, -1)[1]))


def test_experts_with_a_norm_are_refused():
    module = _Experts(lambda x: x)
    module.has_post_expert_norm = True
    with pytest.raises(ModelError, match="must not be normalised"):
        gate_form(module)


def test_attention_with_an_unknown_tensor_is_refused():
    model = tiny_model("llama")
    install_hooks()
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, position_bias=torch.zeros(1), **kwargs)
    with pytest.raises(ModelError, match=r"LlamaAttention: attention takes a tensor .*: position_bias"):
        export_model(model)
    assert model.config._attn_implementation == HOOK
