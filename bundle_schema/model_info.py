"""What the runtime and the planner must know of a language model, whatever its family."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dsc.bundle_schema.tensors import DType, StrictModel

Size = Annotated[int, Field(ge=1, le=2**40)]


class KvLayer(StrictModel):
    """The KV needs of one attention layer.

    Attributes:
        window: the sliding window in positions (query p sees keys j with p - window < j <= p), None when full.
        ring: the graph keeps position p in row p mod rows, so the layer needs no more rows than its window and a round.
    """

    n_kv_heads: Size
    head_dim: Size
    window: Size | None = None
    ring: bool = False


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

    @property
    def rings(self) -> frozenset[int]:
        """The layers whose pools may be rings."""
        return frozenset(index for index, layer in enumerate(self.kv_layers) if layer.ring)

    def on_backend(self, backend: str, kv_dtype: DType) -> ModelInfo:
        """The same of the graphs for a backend, whose pools have this element type: only the CPU's have rings."""
        return self.with_pools(kv_dtype, self.rings if backend == "cpu" else frozenset())

    def with_pools(self, kv_dtype: DType, rings: frozenset[int]) -> ModelInfo:
        """The same of graphs whose pools have this element type, and in these layers may be rings."""
        layers = [layer.model_copy(update={"ring": index in rings}) for index, layer in enumerate(self.kv_layers)]
        return self.model_copy(update={"kv_dtype": kv_dtype, "kv_layers": tuple(layers)})
