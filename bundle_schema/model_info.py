"""What the runtime and the planner must know of a language model, whatever its family."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dsc.bundle_schema.tensors import DType, StrictModel

Size = Annotated[int, Field(ge=1, le=2**40)]


class KvLayer(StrictModel):
    """The KV needs of one attention layer.

    `window` is the sliding window in positions (query p sees keys j with p - window < j <= p), None when full.
    """

    n_kv_heads: Size
    head_dim: Size
    window: Size | None = None


class RopeInfo(StrictModel):
    """Rotary embedding as the checkpoint declares it (`kind` is transformers' rope_type)."""

    kind: str = "default"
    theta: float | None = None
    scaling: dict[str, float | int | str | bool | list[float] | list[int]] = Field(default_factory=dict)


class ExpertsInfo(StrictModel):
    """Mixture of experts: how many there are in a layer and how many a token uses."""

    n_experts: Size
    top_k: Size


class ModelInfo(StrictModel):
    """A decoder-only language model seen from outside.

    Attributes:
        architecture: the class name in the checkpoint's config, e.g. ``LlamaForCausalLM``.
        vocab_size: width of a logits row, padding included.
        max_length: the model's own maximum number of positions.
        kv_layers: one entry a layer that keeps keys and values, in graph order.
        kv_dtype: element type of the pools in the graph.
        eos_ids: tokens that end a generation; may be empty.
    """

    architecture: str
    model_type: str
    vocab_size: Size
    hidden_size: Size
    n_layers: Size
    n_heads: Size
    max_length: Size
    n_parameters: Size
    kv_layers: tuple[KvLayer, ...]
    kv_dtype: DType = DType.FLOAT32
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    rope: RopeInfo = RopeInfo()
    experts: ExpertsInfo | None = None
    quantization: str = "none"
    name: str = ""
    licence: str | None = None
