"""Small files beside the bundle: there when they are whole, and not at all before."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that replaces `path` when the block ends; when the block fails, nothing is left of it.

    Args:
        path: a symbolic link is followed.

    Raises:
        OSError: it cannot be written; an older file at `path` is as it was.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".dsc-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
