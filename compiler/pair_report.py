"""`dsc check-tokenizers`: two tokenizers compared by what they do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dsc.bundle_schema.errors import ModelError
from dsc.compiler.sources import GGUF_SUFFIX
from dsc.compiler.tokenizer_match import compare_on_text, match_tokenizers


def compare_tokenizers(draft: Path, target: Path, text: str) -> dict[str, Any]:
    """The verdict, every differing id with both strings, and where the two cut `text` differently.

    Raises:
        ModelError: a path holds no tokenizer.
    """
    draft_files, target_files = read_tokenizer(draft), read_tokenizer(target)
    verdict = match_tokenizers(target_files, draft_files)
    return {
        "compatible": verdict.compatible,
        "reason": verdict.reason,
        "verdict": {
            "relation": verdict.relation,
            "ids of the target": verdict.n_target,
            "ids of the draft": verdict.n_draft,
            "ids that may be proposed": verdict.n_shared,
            "notes": "; ".join(verdict.notes) or "none",
        },
        "differences": [[item.id, item.draft, item.target] for item in verdict.differences],
        "on_text": [
            [item.text, list(item.draft_ids), list(item.target_ids)]
            for item in compare_on_text(draft_files, target_files, text)
        ],
    }


def read_tokenizer(path: Path) -> dict[str, bytes]:
    """The tokenizer files of an HF directory, a GGUF file or a bundle.

    Raises:
        ModelError: there is none.
    """
    if os.path.isdir(path):  # `Path.is_dir` raises for a name that is too long
        from dsc.compiler.hf_files import tokenizer_files

        files = tokenizer_files(path)
    elif not os.path.exists(path):
        raise ModelError(str(path), "a directory, a GGUF file or a bundle must be there, nothing is")
    elif path.suffix.lower() == GGUF_SUFFIX and path.is_file():
        from dsc.compiler.gguf_reader import open_gguf
        from dsc.compiler.tokenizer_gguf import tokenizer_from_gguf

        files = tokenizer_from_gguf(open_gguf(path))
    else:
        files = _bundled(path)
    if "tokenizer.json" not in files:
        raise ModelError(str(path), "a tokenizer is required, tokenizer.json is missing")
    return files


def _bundled(path: Path) -> dict[str, bytes]:
    from dsc.bundle_schema.container import open_bundle

    with open_bundle(path) as bundle:
        return {member.removeprefix("tokenizer/"): bundle.read(member) for member in bundle.manifest.tokenizer.members}
