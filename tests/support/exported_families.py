"""Every family of the support table: its tiny model, exported once a session, and its agreement with `transformers`.

``python tests/support/exported_families.py`` writes the table into docs/reference/models.md; a test compares them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from reference_forward import ReferenceForward
from tiny_models import FAMILIES, tiny_model

from dsc.compiler.export_hf import export_model
from dsc.compiler.exported import ExportedModel

CUTS = (0, 5, 9, 256)
TABLE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


@dataclass(frozen=True)
class Parity:
    """Agreement of logits: largest difference relative to their range, and whether every argmax is the same."""

    difference: float
    same_argmax: bool


@cache
def exported_family(family: str) -> ExportedModel:
    return export_model(tiny_model(family))


@cache
def reference_logits(family: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Token ids [2, 256] and the logits that `transformers` gives for them in one pass."""
    ids = torch.randint(3, 320, (2, CUTS[-1]), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return ids.numpy(), tiny_model(family)(ids).logits.numpy()


def parity(exported: ExportedModel, ids: npt.NDArray[Any], logits: npt.NDArray[Any], cuts: tuple[int, ...]) -> Parity:
    """Run `ids` [B, S] in chunks at `cuts` and compare with `logits` [B, S, V]."""
    run = ReferenceForward(exported, ids.shape[0])
    got = np.concatenate([run(ids[:, a:b]) for a, b in pairwise(cuts)], axis=1)
    difference = float(np.abs(got - logits).max() / (logits.max() - logits.min()))
    return Parity(difference, bool((got.argmax(-1) == logits.argmax(-1)).all()))


def features(exported: ExportedModel) -> str:
    """What of the model is out of the ordinary, read from the exported graph and facts."""
    info, graph = exported.info, exported.model.graph
    attention = [node for node in graph if node.op_type == "VerifyAttention"]
    windows = {kv.window for kv in info.kv_layers}
    found = [
        "sliding window" if windows - {None} and None not in windows else "",
        "sliding and full layers" if len(windows) > 1 else "",
        f"{info.experts.n_experts} experts, {info.experts.top_k} a token" if info.experts else "",
        "softcap" if any(node.attributes["softcap"].as_float() for node in attention) else "",
        "attention sinks" if any(len(node.inputs) > 6 for node in attention) else "",
        "partial rotary" if info.rope.scaling.get("partial_rotary_factor", 1.0) != 1.0 else "",
        info.rope.kind if info.rope.kind not in ("default", "none") else "",
    ]
    return ", ".join(filter(None, found)) or "-"


def distinct_layers(family: str) -> int:
    """How many layers had to be traced."""
    from dsc.compiler.export_hooks import HOOK, install_hooks
    from dsc.compiler.export_probe import distinct, observe

    install_hooks()
    model = copy.deepcopy(tiny_model(family))
    model.set_attn_implementation(HOOK)
    model.set_experts_implementation(HOOK)
    return len(distinct(observe(model, model.config, 64)))


def table_row(family: str) -> str:
    exported = exported_family(family)
    traced = f"{distinct_layers(family)} of {exported.info.n_layers}"
    return f"| `{family}` | `{exported.info.architecture}` | {features(exported)} | {traced} |"


def support_table() -> str:
    head = ["| model type | class | beyond plain attention | layers traced |", "|---|---|---|---|"]
    return "\n".join([*head, *map(table_row, FAMILIES)])


def documented_table() -> str:
    text = TABLE.read_text(encoding="utf-8")
    return text.partition(BEGIN)[2].partition(END)[0].strip()


if __name__ == "__main__":
    before, _, rest = TABLE.read_text(encoding="utf-8").partition(BEGIN)
    TABLE.write_text(f"{before}{BEGIN}\n{support_table()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
