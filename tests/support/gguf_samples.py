"""Small GGUF files, written with the gguf library."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

BYTES = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
BYTES += [chr(256 + index) for index in range(68)]


def vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and token types of a byte-level tokenizer with three control tokens."""
    merges = ["Ġ t", "h e", "Ġt he", "i n", "1 2", "Ġ Ġ"]
    control = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*control, *BYTES, *(merge.replace(" ", "") for merge in merges)]
    return tokens, merges, [3] * 3 + [1] * (len(tokens) - 3)


def write_llama(
    path: Path, *, kind: str = "Q4_1", pre: str = "smollm", extra: dict[str, object] | None = None, head: bool = False
) -> Path:
    """A llama of 2 layers, 4 heads of 16, 2 KV heads, whose matrices have the type `kind`."""
    tokens, merges, types = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}")
    for key, value in (extra or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    _add_weights(writer, len(tokens), kind, head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_weights(writer: gguf.GGUFWriter, n_tokens: int, kind: str, head: bool) -> None:
    rng = np.random.default_rng(0)
    qtype = gguf.GGMLQuantizationType[kind]

    def matrix(name: str, n_rows: int, n_columns: int) -> None:
        weights = rng.normal(0, 0.2, (n_rows, n_columns)).astype(np.float32)
        writer.add_tensor(name, gguf.quantize(weights, qtype), raw_dtype=qtype)

    def norm(name: str) -> None:
        writer.add_tensor(name, rng.normal(1, 0.1, 64).astype(np.float32))

    matrix("token_embd.weight", n_tokens, 64)
    if head:
        matrix("output.weight", n_tokens, 64)
    norm("output_norm.weight")
    for layer in range(2):
        block = f"blk.{layer}."
        norm(block + "attn_norm.weight")
        norm(block + "ffn_norm.weight")
        matrix(block + "attn_q.weight", 64, 64)
        matrix(block + "attn_k.weight", 32, 64)
        matrix(block + "attn_v.weight", 32, 64)
        matrix(block + "attn_output.weight", 64, 64)
        matrix(block + "ffn_gate.weight", 96, 64)
        matrix(block + "ffn_up.weight", 96, 64)
        matrix(block + "ffn_down.weight", 64, 96)
