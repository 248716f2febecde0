"""GGUF tensors under `transformers`' parameter names: dense in fp32, and as the file's own blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsc.bundle_schema.errors import ModelError
from dsc.compiler.gguf_blocks import BlockWeight, block_weight, why_not_blocks
from dsc.compiler.gguf_reader import GgufFile, GgufTensor

_ROWS_AT_ONCE = 32


@dataclass(frozen=True)
class GgufWeights:
    """Every weight of the model.

    Attributes:
        state_dict: parameter name -> torch float32 tensor.
        block_weights: parameter name -> the blocks it was dequantised from, where the layout can carry them.
        dense: parameter name -> why a quantised matrix is carried dense only.
    """

    state_dict: dict[str, Any]
    block_weights: dict[str, BlockWeight]
    dense: dict[str, str]


def read_weights(file: GgufFile, config: Any) -> GgufWeights:
    """Dequantise and rename every tensor by `transformers`' own tables.

    Raises:
        ModelError: a tensor has no place in the model, or a type that the gguf library cannot dequantise.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=_processor_config(config))
    names = _parameter_names(file, config, processor)
    weights = GgufWeights({}, {}, {})
    for tensor in file.tensors:
        _add(file, tensor, processor, names, weights)
    return weights


def _processor_config(config: Any) -> dict[str, Any]:
    """What the processors read; GPT-2 and BLOOM name their heads differently."""
    facts = dict(config.to_dict())
    for name in config.attribute_map:
        facts.setdefault(name, getattr(config, name))
    return facts


def _parameter_names(file: GgufFile, config: Any, processor: Any) -> dict[str, str]:
    """GGUF tensor name -> parameter name."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    try:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        return dict(get_gguf_hf_weights_map(_Named(skeleton), processor))
    except (NotImplementedError, ValueError, KeyError) as error:
        raise ModelError(
            str(file.path),
            f"the tensors of architecture {file.architecture!r} cannot be named: {error}",
            "give the original Hugging Face directory",
        ) from error


class _Named:
    """A model as far as its names matter: itself and its decoder.

    The mapping builds its whole table anew for every module below, half a minute for a small model, where only the
    decoder's own names can differ (some files were converted from a model without its head).
    """

    def __init__(self, model: Any, *, with_decoder: bool = True) -> None:
        self.config = model.config
        self.state_dict = model.state_dict
        decoder = model.base_model
        self._children = [(model.base_model_prefix, _Named(decoder, with_decoder=False))] if with_decoder else []

    def named_children(self) -> list[tuple[str, Any]]:
        """The decoder below the model, nothing below the decoder."""
        return self._children


def _add(file: GgufFile, tensor: GgufTensor, processor: Any, names: Mapping[str, str], weights: GgufWeights) -> None:
    """Dequantise one tensor; a processor may also put several parameters into the state dict by itself."""
    before = len(weights.state_dict)
    dense = _process(processor, tensor, _dequantise(file, tensor), names, weights.state_dict)
    if dense is None or dense.name is None:
        if len(weights.state_dict) == before and not _filled_by_parts(tensor.name):
            raise ModelError(str(file.path), f"tensor {tensor.name} has no place in the model")
        return
    if dense.name not in names:
        raise ModelError(
            str(file.path),
            f"tensor {tensor.name} has no place in the model that the metadata describes",
            "give the original Hugging Face directory",
        )
    parameter = names[dense.name]
    weights.state_dict[parameter] = _torch(dense.weights)
    if tensor.kind in ("F32", "F16", "BF16", "F64") or len(tensor.shape) == 1:
        return
    order = _row_order(processor, tensor, names)
    reason = why_not_blocks(tensor) or ("" if order is not None else "its layout is changed")
    if reason or order is None:
        weights.dense[parameter] = reason
        return
    block = block_weight(tensor)
    in_order = np.array_equal(order, np.arange(len(order)))
    weights.block_weights[parameter] = block if in_order else block.take_rows(order)


def _filled_by_parts(name: str) -> bool:
    """Whether the tensor is a part (gate or up) of a parameter that another tensor has already made."""
    return "_exps" in name


def _process(processor: Any, tensor: GgufTensor, weights: Any, names: Mapping[str, str], state: dict[str, Any]) -> Any:
    return processor.process(
        weights=weights, name=tensor.name, tensor_key_mapping=names, parsed_parameters={"tensors": state}
    )


def _dequantise(file: GgufFile, tensor: GgufTensor) -> np.ndarray[Any, Any]:
    import gguf

    data = tensor.data
    if data.ndim == 2 and len(data) % _ROWS_AT_ONCE == 0:  # the library works on 16 rows at a time, however short
        data = data.reshape(len(data) // _ROWS_AT_ONCE, -1)
    try:
        values = gguf.dequantize(data, gguf.GGMLQuantizationType[tensor.kind])
    except NotImplementedError as error:
        raise ModelError(
            str(file.path), f"tensor {tensor.name} has type {tensor.kind}, which the gguf library cannot dequantise"
        ) from error
    return np.asarray(values, np.float32).reshape(tensor.shape)


def _row_order(
    processor: Any, tensor: GgufTensor, names: Mapping[str, str]
) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Which row of the file each row of the parameter is, None when the processor does more than move rows.

    The processor itself is asked, with row numbers in place of the weights.
    """
    n_rows = tensor.shape[0]
    numbers = np.arange(n_rows, dtype=np.int64)[:, None]
    result = _process(processor, tensor, numbers, names, {})
    if result is None or result.name != tensor.name or result.weights.shape != numbers.shape:
        return None
    order = np.asarray(result.weights[:, 0])
    return order if np.array_equal(np.sort(order), numbers[:, 0]) else None


def _torch(weights: np.ndarray[Any, Any]) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(weights, np.float32) if weights.flags.writeable else weights.copy())
