"""The tokenizer's files of any model source."""

from __future__ import annotations

from pathlib import Path

from dsc.bundle_schema.errors import ModelError
from dsc.compiler import hf_files
from dsc.compiler.gguf_reader import open_gguf
from dsc.compiler.tokenizer_gguf import tokenizer_from_gguf


def tokenizer_files(source: Path) -> dict[str, bytes]:
    """File name -> content, from a Hugging Face directory or from a GGUF file's metadata.

    Raises:
        ModelError: there is no tokenizer, or none that can be rebuilt.
    """
    source = Path(source)
    if source.is_file():
        return tokenizer_from_gguf(open_gguf(source))
    files = hf_files.tokenizer_files(source)
    if "tokenizer.json" not in files:
        raise ModelError(
            str(source),
            "a tokenizer.json is required, there is none",
            "save it with transformers: AutoTokenizer.from_pretrained(dir).save_pretrained(dir)",
        )
    return files
