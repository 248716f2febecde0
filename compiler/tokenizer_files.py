"""The tokenizer's files of any model source."""

from __future__ import annotations

from pathlib import Path

from dsc.bundle_schema.errors import ModelError
from dsc.compiler import hf_files
from dsc.compiler.gguf_reader import open_gguf
from dsc.compiler.onnx_external import onnx_file
from dsc.compiler.onnx_facts import read_files
from dsc.compiler.tokenizer_gguf import tokenizer_from_gguf


def tokenizer_files(source: Path) -> dict[str, bytes]:
    """File name -> content, from a Hugging Face directory, a GGUF file's metadata or beside an ONNX file.

    Raises:
        ModelError: there is no tokenizer, or none that can be rebuilt.
    """
    source = Path(source)
    graph = onnx_file(source)
    if source.is_file() and graph is None:
        return tokenizer_from_gguf(open_gguf(source))
    files = hf_files.tokenizer_files(source) if graph is None else read_files(graph.absolute().parent).tokenizer
    if "tokenizer.json" not in files:
        raise ModelError(
            str(source),
            "a tokenizer.json is required, there is none",
            "save it with transformers: AutoTokenizer.from_pretrained(dir).save_pretrained(dir)",
        )
    return files
