"""Small bundles, manifests and model descriptions for tests; every value is fixed, so bytes are too."""

from __future__ import annotations

from pathlib import Path

from dsc.bundle_schema.container import BundleWriter
from dsc.bundle_schema.manifest import (
    DraftEntry,
    GraphEntry,
    Manifest,
    ModelEntry,
    Requires,
    TokenizerEntry,
)
from dsc.bundle_schema.model_info import KvLayer, ModelInfo
from dsc.bundle_schema.tensors import DType, TensorSpec

WEIGHTS = (b"\x01\x02\x03\x04" * 301, b"\x05\x06\x07\x08" * 5000)
SMALL_MEMBERS = {
    "target/graph.onnx": b"not a real graph" * 7,
    "kv_plan.json": b'{"plan": 1}',
    "dflash_config.json": b'{"config": 1}',
    "tokenizer/tokenizer.json": b"{}",
    "card.md": b"",
}


def sample_info(n_layers: int = 2, window: int | None = None, n_kv_heads: int = 2, head_dim: int = 8) -> ModelInfo:
    layer = KvLayer(n_kv_heads=n_kv_heads, head_dim=head_dim, window=window)
    return ModelInfo(
        architecture="ToyForCausalLM",
        model_type="toy",
        vocab_size=64,
        hidden_size=16,
        n_layers=n_layers,
        n_heads=4,
        max_length=128,
        n_parameters=1234,
        kv_layers=(layer,) * n_layers,
    )


def sample_manifest() -> Manifest:
    graph = GraphEntry(
        member="target/graph.onnx",
        backend="cpu",
        role="forward",
        ir_version=10,
        opsets={"": 21, "ai.dspark": 1},
        inputs=(TensorSpec(name="input_ids", dtype=DType.INT64, axes=("batch", "seq")),),
        outputs=(TensorSpec(name="logits", dtype=DType.FLOAT32, axes=("batch", "rows", 64)),),
        operators={"::MatMul": 3},
    )
    return Manifest(
        name="sample",
        created_by={"dsc": "0.1.0"},
        recipe={"target": "toy", "window": 4, "ratio": 0.1},
        requires=Requires(min_onnxruntime="1.31", ir_version=10, opsets={"": 21}),
        target=ModelEntry(info=sample_info(), graphs=(graph,)),
        draft=DraftEntry(kind="ngram"),
        tokenizer=TokenizerEntry(members=("tokenizer/tokenizer.json",)),
    )


def write_sample(path: Path, small: dict[str, bytes] | None = None) -> Manifest:
    """Write a small bundle: two weights, then the small members."""
    with BundleWriter(path) as writer:
        for index, payload in enumerate(WEIGHTS):
            writer.add_weight(payload, DType.FLOAT32, (len(payload) // 4,), ("target/graph.onnx", f"weight {index}"))
        for name, payload in (SMALL_MEMBERS | (small or {})).items():
            writer.add(name, payload)
        return writer.seal(sample_manifest())
