"""A forward graph over one sequence in chunks, as the runtime reads it, with plain arrays as pools."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx_ir as ir
from pass_graphs import session

CUTS = (0, 5, 9, 10, 24)
"""Where one run ends and the next begins: several rows, and a single one."""
ROWS = 64
"""Of a pool."""


def logits_in_chunks(
    model: ir.Model, info, ids: np.ndarray, pool_dtype: type = np.float32, library: Path | None = None
) -> np.ndarray:
    """Logits of one sequence, the pools handed on from chunk to chunk.

    Args:
        info: the model's `ModelInfo`.
        ids: the first `CUTS[-1]` of them are read.
    """
    run = session(model, library=library)
    names = [output.name for output in run.get_outputs()]
    wanted = {value.name for value in run.get_inputs()}
    pools = {
        f"{role}_pool.{layer}": np.zeros((1, kv.n_kv_heads, ROWS, kv.head_dim), pool_dtype)
        for layer, kv in enumerate(info.kv_layers)
        for role in "kv"
    }
    logits = []
    for start, end in pairwise(CUTS):
        # How lengths are said differs by backend; a graph declares what it reads.
        feeds = {
            "input_ids": ids[None, start:end],
            "position_ids": np.arange(start, end)[None],
            "logit_rows": np.arange(end - start),
            "past_lengths": np.array([start], np.int32),
            "row_offsets": np.array([0, end - start], np.int32),
            "last_rows": np.array([end - 1], np.int32),
            "total_length": np.array(end, np.int32),
        }
        feeds = {name: array for name, array in (feeds | pools).items() if name in wanted}
        outputs = dict(zip(names, run.run(names, feeds), strict=True))
        pools = {name: outputs[name.replace("pool.", "pool_out.")] for name in pools}
        assert outputs["logits"].dtype == np.float32
        logits.append(outputs["logits"][0])
    return np.concatenate(logits)
