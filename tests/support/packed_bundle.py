"""A bundle of the tiny decoder of `forward_graphs`, with the graphs of both kernel sets."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from forward_graphs import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, N_LAYERS, VOCAB, forward_graph
from toy_bundle import write_bundle

from dsc.bundle_schema.model_info import KvLayer, ModelInfo
from dsc.passes.pass_order import Kernels, kernel_passes, shared_passes
from dsc.passes.pipeline import run_pipeline
from dsc.passes.ring_pools import ring_layers


def packed_bundle(
    path: Path,
    max_length: int = 200,
    packed: bool = True,
    window: int | None = None,
    rings: bool = True,
    draft_seed: int | None = None,
    **options,
) -> Path:
    """Write it; `packed=False` leaves out what lets sequences share a forward, as in older bundles.

    Args:
        window: of the first layer; with `rings` it keeps no more rows than that takes.
        draft_seed: of the weights of a draft of the same shape, for the native kernels; None has no draft.
    """
    left_out = {"pack-rows": not packed, "ring-pools": not rings}

    def graph_for(kernels: Kernels, seed: int = 0) -> ir.Model:
        graph = forward_graph(seed, window=window or -1)
        run_pipeline(graph, shared_passes("fp32"))
        passes = kernel_passes(kernels, "fp32", max_length + 17)
        run_pipeline(graph, [one for one in passes if not left_out.get(one.name)])
        return graph

    target, native = graph_for("ort"), graph_for("native")
    ring = 0 in ring_layers(native)
    layer = KvLayer(n_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    first = layer.model_copy(update={"window": window, "ring": ring})
    info = ModelInfo(
        architecture="TinyLlama",
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        n_layers=N_LAYERS,
        n_heads=HEADS,
        max_length=max_length,
        n_parameters=1,
        kv_layers=(first, *(layer,) * (N_LAYERS - 1)),
    )
    if draft_seed is not None:
        options |= {"draft": ir.to_proto(graph_for("native", draft_seed)), "draft_info": info}
    return write_bundle(path, ir.to_proto(target), info, native=ir.to_proto(native), **options)
