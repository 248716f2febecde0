"""Who takes part in the benchmark: runtimes, their models, and the settings that each is run with."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLAIN = "plain"
GENAI_DRAFTS = {"fp32": 8, "int4": 3}  # n-gram drafts a round: what was fastest for it in trials


@dataclass(frozen=True)
class Contender:
    """One process of the benchmark: a runtime with a model.

    Attributes:
        name: runtime and precision.
        peer: the module `peer_<peer>.py` that runs it.
        python: the interpreter of its environment.
        model: file or directory; there or the reason why not is in `missing`.
        options: what `load` gets besides the model.
        modes: name -> the speculation that a request asks for; all run in turn in this process.
        baseline: the contender whose `plain` mode this one's modes are compared with; itself when empty.
        missing: why it cannot take part.
    """

    name: str
    peer: str
    python: Path
    model: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    modes: Mapping[str, Mapping[str, Any] | None] = field(default_factory=lambda: {PLAIN: None})
    baseline: str = ""
    missing: str = ""

    @property
    def megabytes(self) -> float:
        """Size of the model on disk."""
        files = [self.model] if self.model.is_file() else list(self.model.glob("*"))
        return sum(path.stat().st_size for path in files if path.is_file()) / 1e6


def dsc_contenders(bundles: Mapping[str, Path]) -> list[Contender]:
    """dsc at every precision: plain, and with the speculation that the bundle is configured for."""
    python = Path(sys.executable)
    made = []
    for name, path in bundles.items():
        proposer = "self" if name.endswith("-self") else "ngram"
        modes = {PLAIN: None, proposer: {"proposer": proposer}}
        # A loaded draft takes memory and cache: the rate to beat is that of a bundle without one.
        baseline = f"dsc {name.removesuffix('-self')}" if proposer == "self" else ""
        made.append(Contender(f"dsc {name}", "dsc", python, path, modes=modes, baseline=baseline))
    return made


def peer_contenders(python: Path, gguf: Path, checkpoint: Path, genai: Mapping[str, Path | str]) -> list[Contender]:
    """The peers.

    Args:
        python: the interpreter of their environment.
        genai: precision -> its model's directory, or why there is none.
    """
    made = []
    for precision, model in genai.items():
        options = {"ngram_size": 3, "max_draft_tokens": GENAI_DRAFTS[precision]}
        missing = model if isinstance(model, str) else ""
        modes = {PLAIN: None, "ngram": options}
        made.append(
            Contender(f"genai {precision}", "onnxruntime_genai", python, Path(model), modes=modes, missing=missing)
        )
    lookups = {
        "llama_cpp": ("llama.cpp Q4_1", {"max_ngram_size": 3, "num_pred_tokens": 4}),
        "openvino_genai": ("OpenVINO Q4_1", {"max_ngram_size": 3, "num_assistant_tokens": 5}),
    }
    for peer, (name, lookup) in lookups.items():
        made.append(Contender(name, peer, python, gguf))
        options = {"lookup": lookup}
        made.append(Contender(f"{name} +", peer, python, gguf, options, {"lookup": None}, baseline=name))
    modes = {PLAIN: None, "lookup": {"prompt_lookup_num_tokens": 8}}
    return [*made, Contender("transformers fp32", "transformers", python, checkpoint, modes=modes)]
