"""Every family of the support table: its tiny model, exported once a session, and its agreement with `transformers`.

``python tests/support/exported_families.py`` writes the table into docs/reference/models.md; a test compares them.
"""

from __future__ import annotations

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
from transformers import PreTrainedModel

from dsc.bundle_schema.model_info import ModelInfo
from dsc.compiler.export_hf import export_model
from dsc.compiler.export_hooks import HOOK, install_hooks
from dsc.compiler.export_probe import Observation, distinct, observe
from dsc.compiler.exported import ExportedModel
from dsc.compiler.hf_info import model_info

CUTS = (0, 5, 9, 256)
TABLE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


@dataclass(frozen=True)
class Parity:
    """Agreement of logits: largest difference relative to their range, and whether every argmax is the same."""

    difference: float
    same_argmax: bool


@cache
def family_model(family: str) -> PreTrainedModel:
    """The model that `exported_family` exports."""
    return tiny_model(family)


@cache
def exported_family(family: str) -> ExportedModel:
    return export_model(family_model(family))


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


@cache
def observed_family(family: str) -> tuple[ModelInfo, Observation]:
    """The facts and the layers of a family's tiny model, without exporting it."""
    install_hooks()
    model = tiny_model(family)
    model.set_attn_implementation(HOOK)
    model.set_experts_implementation(HOOK)
    observation = observe(model, model.config, 64)
    return model_info(model, model.config, observation), observation


def features(family: str) -> str:
    """What of the model is out of the ordinary."""
    info, observation = observed_family(family)
    _, _, softcaps, sinks = zip(*(layer.settings for layer in observation.layers), strict=True)
    windows = {kv.window for kv in info.kv_layers}
    found = [
        "sliding window" if None not in windows else "",
        "sliding and full layers" if len(windows) > 1 else "",
        f"{info.experts.n_experts} experts, {info.experts.top_k} a token" if info.experts else "",
        "softcap" if any(softcaps) else "",
        "attention sinks" if any(sinks) else "",
        "narrow values" if any(x.attention.value_dim < x.attention.head_dim for x in observation.layers) else "",
        "partial rotary" if info.rope.scaling.get("partial_rotary_factor", 1.0) != 1.0 else "",
        info.rope.kind if info.rope.kind not in ("default", "none") else "",
    ]
    return ", ".join(filter(None, found)) or "-"


def distinct_layers(family: str) -> int:
    """How many layers have to be traced."""
    return len(distinct(observed_family(family)[1]))


def table_row(family: str) -> str:
    info, _ = observed_family(family)
    return f"| `{family}` | `{info.architecture}` | {features(family)} | {distinct_layers(family)} of {info.n_layers} |"


def support_table() -> str:
    head = ["| model type | class | beyond plain attention | layers traced |", "|---|---|---|---|"]
    return "\n".join([*head, *map(table_row, FAMILIES)])


def documented_table() -> str:
    text = TABLE.read_text(encoding="utf-8")
    return text.partition(BEGIN)[2].partition(END)[0].strip()


if __name__ == "__main__":
    before, _, rest = TABLE.read_text(encoding="utf-8").partition(BEGIN)
    TABLE.write_text(f"{before}{BEGIN}\n{support_table()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
