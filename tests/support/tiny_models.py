"""Tiny random language models and tokenizers that every test can make in well under a second.

Weights are spread so that logits differ clearly between tokens, and norms, biases and attention sinks are not
left at their neutral initial values, so that a dropped one shows. Same arguments, same bytes.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

# pytest records every level of every logger, and one export writes thousands of trace records.
logging.getLogger("torch.__trace").propagate = False

TINY_VOCAB = 320
BOS, EOS, PAD = 0, 1, 2
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
MERGE_TEXT = """
the and to of in is it that for was on are as with his they at be this from have or by one had not but what
all were when we there can an your which their said if do will each about how up out them then she many some so
"""
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)

BASE: dict[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}


def partial_rope(factor: float) -> dict[str, Any]:
    """Rotary parameters that turn only the first `factor` of each head."""
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}


SLIDING, FULL = "sliding_attention", "full_attention"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8, "head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "gemma2": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "head_dim": 16,
        "num_hidden_layers": 6,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        "tie_word_embeddings": True,
    },
    "phi3": {"rope_parameters": partial_rope(0.5)},
    "olmo2": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": True},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "stablelm": {"rope_parameters": partial_rope(0.25)},
}


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """The tiny configuration of a `transformers` model type (a key of `FAMILIES`), by-name overrides."""
    return CONFIG_MAPPING[family](**(BASE | FAMILIES[family] | overrides))


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model of `tiny_config`, the same for the same arguments."""
    return random_model(tiny_config(family, **overrides), seed)


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random fp32 model of any configuration."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        spread_weights(model)
    return model


@torch.no_grad()
def spread_weights(model: torch.nn.Module) -> None:
    """Give matrices unit gain and move every vector (norms, biases, sinks) off its initial value."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        else:
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)


def tiny_dir(path: Path, family: str = "llama", *, seed: int = 0, tokenizer: bool = True, **overrides: Any) -> Path:
    """Save a tiny model (safetensors, config, generation config, tokenizer) into `path`; returns `path`."""
    return save_dir(path, tiny_model(family, seed, **overrides), tokenizer=tokenizer)


def tiny_llama_dir(path: Path, *, n_layers: int = 2, vocab: int = TINY_VOCAB, seed: int = 0, **overrides: Any) -> Path:
    """Save a tiny Llama with its tokenizer; two seeds give two models over the same tokenizer."""
    return tiny_dir(path, "llama", seed=seed, num_hidden_layers=n_layers, vocab_size=vocab, **overrides)


def save_dir(path: Path, model: PreTrainedModel, *, tokenizer: bool = True) -> Path:
    """Save any model, and the tiny tokenizer, the way `transformers` does."""
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    if tokenizer:
        write_tokenizer(path, min(model.config.vocab_size, TINY_VOCAB))
    return path


def tiny_tokenizer(vocab: int = TINY_VOCAB) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab` entries (at least 259): any text round-trips."""
    if vocab < len(SPECIAL_TOKENS) + 256:
        raise ValueError(f"a byte-level vocabulary needs {len(SPECIAL_TOKENS) + 256} entries, got {vocab}")
    ids = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        ids[symbol] = len(ids)
    merges = _merges(ids, vocab)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def _merges(ids: dict[str, int], vocab: int) -> list[tuple[str, str]]:
    """Merges that build common words from the left; adds new symbols to `ids` until `vocab` is reached."""
    merges: list[tuple[str, str]] = []
    for word in MERGE_TEXT.split():
        text = "Ġ" + word
        for end in range(2, len(text) + 1):
            if text[:end] not in ids and len(ids) < vocab:
                ids[text[:end]] = len(ids)
                merges.append((text[: end - 1], text[end - 1]))
    return merges


def write_tokenizer(directory: Path, vocab: int = TINY_VOCAB) -> None:
    """Write tokenizer.json and tokenizer_config.json (with a chat template) into `directory`."""
    tiny_tokenizer(vocab).save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": BASE["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
