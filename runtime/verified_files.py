"""Hashing a bundle once: a file that was verified is not hashed again until it changes."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

from dsc.bundle_schema.bundle_reader import OpenBundle
from dsc.bundle_schema.errors import RequestError

VerifyMode = Literal["always", "once", "never"]


def cache_folder() -> Path:
    """Where verified files are remembered: ``dsc/verified`` in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "dsc" / "verified"


def verify_bundle(bundle: OpenBundle, mode: VerifyMode, folder: Path | None = None) -> bool:
    """Compare every member's SHA-256 with the manifest, as `mode` says.

    Args:
        bundle: an open bundle.
        mode: ``once`` skips a file whose path, inode, size and modification time are those of a file that passed
            before.
        folder: where to remember, `cache_folder()` when None. A folder that cannot be written is no error.

    Returns:
        Whether the hashes were computed now.

    Raises:
        ChecksumMismatch: names the first member that is not what was written.
        RequestError: an unknown mode.
    """
    if mode not in ("always", "once", "never"):
        raise RequestError("verify", f"'always', 'once' or 'never' is required, got {mode!r}")
    if mode == "never":
        return False
    mark = (folder or cache_folder()) / _identity(bundle)
    if mode == "once" and mark.exists():
        return False
    bundle.verify()
    with suppress(OSError):  # a read-only home: verified again next time
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    return True


def _identity(bundle: OpenBundle) -> str:
    """A name for the file as it is now; any change of its content that keeps the clock right changes it."""
    facts = f"{os.path.realpath(bundle.path)}\0{bundle.identity}"
    return hashlib.sha256(os.fsencode(facts)).hexdigest()
