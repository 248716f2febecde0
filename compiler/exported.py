"""What an importer hands to the rest of the compiler, whatever the model came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsc.bundle_schema.model_info import ModelInfo

if TYPE_CHECKING:
    import onnx_ir as ir

    from dsc.compiler.gguf_blocks import BlockWeight


@dataclass(frozen=True)
class ExportedModel:
    """A language model as a forward graph.

    Graph inputs: `input_ids`, `position_ids` int64 [B, S]; `logit_rows` int64 [R] (positions along S whose logits
    are wanted); `past_lengths` int32 [B]; `k_pool.{i}`, `v_pool.{i}` [B, Hkv, M, D] for each layer i that keeps keys
    and values. Outputs: `logits` float32 [B, R, V]; `k_pool_out.{i}`, `v_pool_out.{i}`; `tap.{layer}` [B, S, H] when
    asked for. Weights are initializers named by the checkpoint's parameter names in the checkpoint's layout, so a
    product reads its matrix through one Transpose node; they wrap the loader's memory and are never copied.

    Attributes:
        model: the graph, with `ai.dspark` VerifyAttention (one a layer) and Experts nodes.
        info: the facts about the model that the planner and the runtime need.
        tokenizer: file name -> content of the tokenizer's files, unchanged.
        block_weights: initializer name -> the quantised blocks it was computed from; empty unless the source had some.
        source: where the model came from, in words.
        notes: what a person should know of how it was exported, e.g. why layers were not stamped.
    """

    model: ir.Model
    info: ModelInfo
    tokenizer: dict[str, bytes]
    block_weights: dict[str, BlockWeight] = field(default_factory=dict)
    source: str = ""
    notes: tuple[str, ...] = ()
