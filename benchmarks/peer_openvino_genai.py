"""OpenVINO GenAI, which reads the GGUF file itself; speculation by its prompt lookup."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import openvino
import openvino_genai

VERSION = f"openvino-genai {openvino_genai.__version__}"


class Runtime:
    def __init__(self, options: dict[str, Any]) -> None:
        self._lookup = options.get("lookup")
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options["threads"]}
        if self._lookup:
            properties["prompt_lookup"] = True
        self._pipeline = openvino_genai.LLMPipeline(options["model"], "CPU", **properties)

    def generate(self, ids: list[int], n_tokens: int, speculation: dict[str, Any] | None) -> dict[str, Any]:
        config = openvino_genai.GenerationConfig(max_new_tokens=n_tokens, do_sample=False)
        for name, value in (self._lookup or {}).items():
            setattr(config, name, value)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(np.array([ids], np.int64)), openvino.Tensor(np.ones((1, len(ids)), np.int64))
        )
        start = perf_counter()
        result = self._pipeline.generate(inputs, config)
        end = perf_counter()
        first = result.perf_metrics.get_ttft().mean / 1000
        return {"ids": list(result.tokens[0])[:n_tokens], "first_s": first, "total_s": end - start}


def load(options: dict[str, Any]) -> Runtime:
    return Runtime(options)
