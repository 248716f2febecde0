"""transformers, eager PyTorch in float32; speculation by its prompt lookup."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation import BaseStreamer

VERSION = f"transformers {transformers.__version__}, torch {torch.__version__}"


class FirstToken(BaseStreamer):
    """Notes when the first token after the prompt came."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = 0.0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = perf_counter()

    def end(self) -> None:
        pass


class Runtime:
    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        self._model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32).eval()

    def generate(self, ids: list[int], n_tokens: int, speculation: dict[str, Any] | None) -> dict[str, Any]:
        prompt = torch.tensor([ids])
        streamer = FirstToken()
        start = perf_counter()
        found = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=n_tokens,
            do_sample=False,
            streamer=streamer,
            **(speculation or {}),
        )
        end = perf_counter()
        return {"ids": found[0, len(ids) :].tolist(), "first_s": streamer.at - start, "total_s": end - start}


def load(options: dict[str, Any]) -> Runtime:
    return Runtime(options)
