"""Which target a bundle holds: what was recorded with one model says nothing of another."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from dsc.bundle_schema.container import WEIGHTS_NAME
from dsc.bundle_schema.manifest import Manifest


@dataclass(frozen=True)
class ModelId:
    """The bundle's name, for people, and a SHA-256 of its target and weights; schedules do not count."""

    name: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name!r} ({self.digest[:12]})"


def model_id(manifest: Manifest) -> ModelId:
    """Of the bundle with this manifest."""
    names = {graph.member for graph in manifest.target.graphs}  # hold the weights where they are few
    if manifest.member(WEIGHTS_NAME) is not None:
        names = {WEIGHTS_NAME}
    content = [member.sha256 for member in manifest.members if member.name in names]
    content.append(manifest.target.model_dump_json())
    return ModelId(manifest.name, hashlib.sha256("".join(content).encode()).hexdigest())
