"""A tiny graph whose embedding is its head, and blocks with minima for it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from pass_graphs import text_model

E = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)


def tied_embedding(ids: str = "int64") -> ir.Model:
    """``e`` are rows of the matrix, ``logits`` products with it."""
    return text_model(
        f"""agraph ({ids}[batch, seq] ids, float[batch, seq, 64] h, float[50, 64] w)
        => (float[batch, seq, 64] e, float[batch, seq, 50] logits)
        {{ e = Gather(w, ids) t = Transpose<perm=[1, 0]>(w) logits = MatMul(h, t) }}""",
        w=E,
    )


class WithMins:
    """As a checkpoint's own blocks of that matrix."""

    bits = 4
    qweight = np.random.default_rng(1).integers(0, 256, (50, 2, 16), dtype=np.uint8)
    scales = np.random.default_rng(2).uniform(0.5, 1, (50, 2)).astype(np.float32)
    mins = np.random.default_rng(3).standard_normal((50, 2)).astype(np.float32)
