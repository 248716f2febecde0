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
    graphs = {graph.member for graph in manifest.target.graphs}  # hold the weights where they are few
    weights = manifest.member(WEIGHTS_NAME)
    members = [weights] if weights is not None else [one for one in manifest.members if one.name in graphs]
    # In this order: files of continuations that were saved under the digest must keep their model.
    content = [manifest.target.model_dump_json(), *(member.sha256 for member in members)]
    return ModelId(manifest.name, hashlib.sha256("".join(content).encode()).hexdigest())
