"""Models from a bundle's graphs: the graph that suits a backend, a session over it, and its zone of the arena."""

from __future__ import annotations

import os
from typing import Any

from dsc.bundle_schema.container import OpenBundle, relocate_graph
from dsc.bundle_schema.dflash_config import MAX_WINDOW
from dsc.bundle_schema.errors import BundleError, DscError
from dsc.bundle_schema.kv_layout import draft_shares
from dsc.bundle_schema.kv_plan import Owner
from dsc.bundle_schema.manifest import GraphEntry, ModelEntry
from dsc.runtime.cached_model import CachedModel
from dsc.runtime.device_arena import DeviceArena
from dsc.runtime.device_verify import DeviceTail
from dsc.runtime.host import SessionSettings, create_session
from dsc.runtime.kv_arena import KvArena, KvZone
from dsc.runtime.session import ForwardSession
from dsc.runtime.shared_draft import SharedDraft

PREFILL_CHUNK = 512
"""Most tokens that a forward reads; fewer where a ring has less room."""
MAX_ROWS = MAX_WINDOW + 1
"""Most rows of a call whose logits are wanted: the last token and the drafts."""


class Placer:
    """Makes sessions from the bundle's graphs for the CPU and binds them to their zones of the arena.

    Attributes:
        settings: of every session.
        arena: of all models.
        tail: judges blocks where the logits are; None on the CPU.
    """

    tail: DeviceTail | None = None

    def __init__(
        self, bundle: OpenBundle, settings: SessionSettings, arena: KvArena | DeviceArena, max_length: int
    ) -> None:
        self.settings = settings
        self.arena = arena
        self._bundle = bundle
        self._max_length = max_length

    def place(self, owner: Owner, entry: ModelEntry) -> CachedModel:
        """A model with an empty cache.

        Raises:
            BundleError: there is no forward graph for the backend, or it is not what it should be.
            HostError: onnxruntime refuses it.
        """
        max_length = min(self._max_length, entry.info.max_length)
        zone: KvZone = self.arena.zone(owner, max_length)
        return CachedModel(self._forward(owner, entry, zone), zone, max_length)

    def _share(self, target: CachedModel, entry: ModelEntry) -> CachedModel:
        """A draft over the target's cache."""
        forward = self._forward("draft", entry, target.zone)
        return SharedDraft(forward, target, min(self._max_length, entry.info.max_length))

    def _forward(self, owner: Owner, entry: ModelEntry, zone: KvZone) -> ForwardSession:
        """The model's forward graph for the CPU over the pools of `zone`."""
        roles = ("forward_native", "forward") if self.settings.library else ("forward",)
        graph = forward_graph(self._bundle, self.settings.provider, owner, entry, *roles)
        session = self.session(graph, self.settings)
        chunk = PREFILL_CHUNK if zone.ring is None else min(PREFILL_CHUNK, zone.ring.room)
        return ForwardSession(session, zone, entry.info.vocab_size, MAX_ROWS, chunk, graph.member)

    def place_draft(self, target: CachedModel, strict: bool) -> tuple[CachedModel | None, str]:
        """The draft model if the bundle has one, or why it could not be loaded.

        Args:
            target: whose cache the draft may share.
        """
        entry = self._bundle.manifest.draft.model
        if entry is None:
            return None, ""
        try:
            return self._share(target, entry) if draft_shares(self.arena.plan) else self.place("draft", entry), ""
        except DscError as error:
            if strict:
                raise
            return None, str(error)

    def session(self, entry: GraphEntry, settings: SessionSettings) -> Any:
        """An onnxruntime session over a graph, whose weights lie in the bundle file by its present name."""
        name = os.path.basename(os.path.realpath(self._bundle.path))
        graph = relocate_graph(self._bundle.read(entry.member), name, entry.member)
        return create_session(graph, settings, entry.member, settings.threads)


def forward_graph(bundle: OpenBundle, provider: str, owner: Owner, entry: ModelEntry, *roles: str) -> GraphEntry:
    """The first of `roles` that a model has a graph of for a provider.

    Raises:
        BundleError: there is none.
    """
    graphs = {graph.role: graph for graph in entry.graphs if graph.backend == provider}
    graph = next((graphs[role] for role in roles if role in graphs), None)
    if graph is None:
        have = ", ".join(sorted({graph.backend for graph in entry.graphs})) or "none"
        what = f"a forward graph of the {owner} for {provider} is required, the bundle has them for: {have}"
        raise BundleError(str(bundle.path), what, f"compile it with --backend {provider}")
    return graph
