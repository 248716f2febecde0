"""onnxruntime-genai: a directory of its own builder; speculation by its n-gram mode."""

from __future__ import annotations

import json
from importlib.metadata import version
from time import perf_counter
from typing import Any

import onnxruntime_genai as og

VERSION = f"onnxruntime-genai {version('onnxruntime-genai')}"


class Runtime:
    def __init__(self, options: dict[str, Any]) -> None:
        config = og.Config(options["model"])
        session = {"intra_op_num_threads": options["threads"]}  # its default is one thread
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = og.Model(config)

    def generate(self, ids: list[int], n_tokens: int, speculation: dict[str, Any] | None) -> dict[str, Any]:
        start = perf_counter()
        params = og.GeneratorParams(self._model)
        params.set_search_options(do_sample=False, max_length=len(ids) + n_tokens)
        if speculation is not None:
            params.set_speculative_options(**speculation)
        generator = og.Generator(self._model, params)
        generator.append_tokens(ids)
        generator.generate_next_token()
        first = perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        end = perf_counter()
        found = generator.get_sequence(0).tolist()[len(ids) :]
        return {"ids": found[:n_tokens], "first_s": first - start, "total_s": end - start}


def load(options: dict[str, Any]) -> Runtime:
    return Runtime(options)
