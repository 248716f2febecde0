"""A configuration that changes while the engine runs: by call, or by a file beside it, between rounds.

An update is taken whole or refused whole; a refused one leaves the configuration as it was and is reported. The file is
JSON: dotted path -> value, as in ``{"windows.max": 6, "policy": "rules"}``. It is read again when its time or size
changes; without it, or when it has been deleted, the bundle's own configuration and the calls' updates hold.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsc.bundle_schema.dflash_config import DflashConfig, ProposerKind, apply_override
from dsc.bundle_schema.errors import ConfigError, DscError
from dsc.bundle_schema.strict_json import parse_object
from dsc.runtime.config_notes import held_back_fields, unread_fields, unused_fields
from dsc.runtime.memory_pressure import PressureWatch


class LiveConfig:
    """The configuration in force.

    Args:
        bundle: as compiled.
        override: file of changes; need not exist.
        watch: changes the configuration while memory is short.
        draft: the kind of draft that the bundle has; None when that is not known.

    Attributes:
        current: what decides the next round.
        configured: the same without what memory pressure has changed.
        version: rises with every change of `current`.
        updates: what was taken and what was refused, in words, newest last.
        notes: what the configuration asks for and this runtime does not do, with the reason.
    """

    def __init__(
        self,
        bundle: DflashConfig,
        override: Path | None = None,
        watch: PressureWatch | None = None,
        draft: ProposerKind | None = None,
    ) -> None:
        self.current = self.configured = bundle
        self.version = 0
        self.updates: list[str] = []
        self.notes = unused_fields(bundle, draft)
        self._bundle = bundle
        self._draft = draft
        self._called: dict[str, Any] = {}
        self._from_file: dict[str, Any] = {}
        self._file = override
        self._watch = watch
        self._seen: tuple[int, int] | None = None
        self.poll()

    def update(self, changes: Mapping[str, Any]) -> None:
        """Change fields by dotted path, all or none.

        Raises:
            ConfigError: names the field and says why; nothing has changed.
        """
        if not isinstance(changes, Mapping) or not all(isinstance(path, str) for path in changes):
            what = f"a mapping of dotted paths to values is required, got {str(changes)[:80]!r}"
            raise ConfigError("changes", what, 'for example {"windows.max": 6}')
        called = {**self._called, **changes}
        try:
            self._take(called, self._from_file, f"call: {', '.join(changes)}")
        except DscError as error:
            self._report(f"refused, call: {error}")
            raise
        self._called = called

    def poll(self) -> None:
        """Take the override file's changes if it has changed; a bad file is reported and not taken.

        The same for memory that has become short, or is no more.
        """
        if self._watch is not None and self._watch.changed(self.configured.pressure):
            changes = self._watch.changes(self.configured)
            self._take(self._called, self._from_file, f"memory pressure: {', '.join(changes) or 'it has ended'}")
        if self._file is None or (stamp := _stamp(self._file)) == self._seen:
            return
        self._seen = stamp
        try:
            changes = _read(self._file) if stamp is not None else {}
            self._take(self._called, changes, f"{self._file.name}: {', '.join(changes) or 'nothing overridden'}")
        except DscError as error:
            self._report(f"refused, {self._file.name}: {error}")
        else:
            self._from_file = changes

    def _take(self, called: Mapping[str, Any], from_file: Mapping[str, Any], what: str) -> None:
        configured = apply_override(self._bundle, {**called, **from_file})
        pressed = self._watch.changes(configured) if self._watch is not None else {}
        self.configured, self.current = configured, apply_override(configured, pressed) if pressed else configured
        self.notes = [
            *unused_fields(configured, self._draft),
            *unread_fields(self._bundle, configured),
            *held_back_fields(self._bundle, configured),
        ]
        self.version += 1
        self._report(f"taken, {what}")

    @property
    def pressed(self) -> bool:
        """Memory is short."""
        return self._watch is not None and self._watch.pressed

    def _report(self, text: str) -> None:
        self.updates = [*self.updates[-15:], text]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return (-1, error.errno or 0)
    return (status.st_mtime_ns, status.st_size)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    return parse_object(data, str(path))
