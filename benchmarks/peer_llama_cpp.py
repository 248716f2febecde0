"""llama.cpp through llama-cpp-python: the GGUF file itself; speculation by its prompt lookup."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

VERSION = f"llama-cpp-python {llama_cpp.__version__}"


class Runtime:
    def __init__(self, options: dict[str, Any]) -> None:
        lookup = options.get("lookup")
        self._model = llama_cpp.Llama(
            options["model"],
            n_ctx=2048,
            n_threads=options["threads"],
            n_threads_batch=options["threads"],
            draft_model=LlamaPromptLookupDecoding(**lookup) if lookup else None,
            logits_all=bool(lookup),  # or a prompt longer than a batch overruns its logits buffer
            verbose=False,
        )

    def generate(self, ids: list[int], n_tokens: int, speculation: dict[str, Any] | None) -> dict[str, Any]:
        self._model.reset()  # or it would not read again what two prompts have in common
        found: list[int] = []
        first = start = perf_counter()
        for token in self._model.generate(ids, temp=0.0):
            found.append(token)
            if len(found) == 1:
                first = perf_counter()
            if len(found) == n_tokens or token == self._model.token_eos():
                break
        return {"ids": found, "first_s": first - start, "total_s": perf_counter() - start}


def load(options: dict[str, Any]) -> Runtime:
    return Runtime(options)
