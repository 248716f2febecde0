"""From a `.dsmodel` file to a model that generates: check, map, plan, place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from dsc.bundle_schema.certificate import CERTIFICATE_NAME, Certificate, parse_certificate
from dsc.bundle_schema.container import OpenBundle, open_bundle, relocate_graph
from dsc.bundle_schema.dflash_config import DFLASH_CONFIG_NAME, MAX_WINDOW, parse_config
from dsc.bundle_schema.errors import BundleError, CheckFailed, DscError, HostError, RequestError
from dsc.bundle_schema.kv_plan import KV_PLAN_NAME, KvPlan, Owner, check_plan, parse_plan
from dsc.bundle_schema.manifest import GraphEntry, ModelEntry
from dsc.kernels.native import NativeLibrary, find_library
from dsc.runtime.arguments import whole_number
from dsc.runtime.cached_model import CachedModel
from dsc.runtime.generate import LoadedBundle, SpeculativeModel
from dsc.runtime.host import SessionSettings, choose_threads, create_session, require_onnxruntime
from dsc.runtime.kv_arena import KvArena
from dsc.runtime.session import ForwardSession
from dsc.runtime.text import TextCodec
from dsc.runtime.verified_files import VerifyMode, verify_bundle

PREFILL_CHUNK = 512

KernelChoice = Literal["auto", "native", "ort"]


def load(
    path: Path | str,
    provider: str = "cpu",
    threads: int | None = None,
    max_length: int | None = None,
    verify: VerifyMode = "once",
    kernels: KernelChoice = "auto",
    strict: bool = True,
    certified: bool = False,
    override: Path | str | None = None,
) -> SpeculativeModel:
    """Open a bundle and make it ready to generate.

    Args:
        path: the bundle; may be a symbolic link.
        provider: ``cpu`` or ``cuda``; what is asked for is what runs.
        threads: for the target; one for each CPU that this process may use when None.
        max_length: most tokens of prompt and output together, at most what the bundle was compiled for.
        verify: hash every member ``always``, ``once`` for a file that has not changed since, or ``never``.
        kernels: ``native`` requires the project's own CPU library, ``ort`` does without, ``auto`` takes it if there.
        strict: a draft that cannot be loaded is an error; otherwise the model decodes plainly and its statistics say
            why.
        certified: refuse a bundle whose certificate's verdict is not ``pass``.
        override: JSON file of changes to the schedule (dotted path -> value), read again between rounds when it
            changes; a bad one is reported in the statistics and not taken.

    Raises:
        BundleError: the file is not a sound bundle, or is too new.
        HostError: onnxruntime is too old, or provider or kernels are not available here.
        PlanError: the KV plan does not fit the models.
        CheckFailed: `certified`, and the certificate says otherwise.
        RequestError: an argument is wrong.
    """
    bundle = open_bundle(path)
    manifest = bundle.manifest
    require_onnxruntime(manifest.requires.min_onnxruntime, str(path))
    verify_bundle(bundle, verify)
    certificate = _certificate(bundle, certified)
    config = parse_config(bundle.read(DFLASH_CONFIG_NAME))
    plan = parse_plan(bundle.read(KV_PLAN_NAME))
    check_plan(plan, manifest.target.info, manifest.draft.model.info if manifest.draft.model else None)
    settings = _settings(bundle, provider, threads, kernels)
    arena = KvArena(plan, config.secure_rollback)
    limit = _limit(plan, max_length)
    placer = _Placer(bundle, settings, arena, limit)
    target = placer.place("target", manifest.target)
    draft, draft_failure = placer.place_draft(strict)
    return SpeculativeModel(
        LoadedBundle(
            manifest=manifest,
            config=config,
            certificate=certificate,
            arena=arena,
            settings=settings,
            target=target,
            draft=draft,
            draft_failure=draft_failure,
            codec=TextCodec(placer.tokenizer_files()) if manifest.tokenizer.members else None,
            max_length=limit,
            override=Path(override) if override is not None else None,
        )
    )


def _certificate(bundle: OpenBundle, certified: bool) -> Certificate:
    certificate = parse_certificate(bundle.read(CERTIFICATE_NAME))
    if certified and certificate.verdict != "pass":
        raise CheckFailed(
            str(bundle.path),
            f"a certificate that says 'pass' is required, got {certificate.verdict!r}",
            "; ".join(certificate.reasons),
        )
    return certificate


def _settings(bundle: OpenBundle, provider: str, threads: int | None, kernels: KernelChoice) -> SessionSettings:
    if kernels not in ("auto", "native", "ort"):
        raise RequestError("kernels", f"'auto', 'native' or 'ort' is required, got {kernels!r}")
    library = NativeLibrary(None, "not asked for")
    if kernels != "ort":
        ours = any(graph.functions or graph.role == "forward_native" for graph in bundle.manifest.graphs())
        library = find_library() if ours else NativeLibrary(None, "the bundle's graphs have none of its operators")
    if kernels == "native" and library.path is None:
        raise HostError("kernels", f"the native CPU library is required: {library.reason}", "load with kernels='auto'")
    folder = os.path.dirname(os.path.realpath(bundle.path))
    return SessionSettings(provider, choose_threads(threads), folder, library)


def _limit(plan: KvPlan, max_length: int | None) -> int:
    if max_length is None:
        return plan.max_length
    hint = f"the bundle was compiled for {plan.max_length}; compile with a larger maximum length"
    return whole_number(max_length, "max_length", 2, plan.max_length, hint)


class _Placer:
    """Makes sessions from the bundle's graphs and binds them to their zones of the arena."""

    def __init__(self, bundle: OpenBundle, settings: SessionSettings, arena: KvArena, max_length: int) -> None:
        self._bundle = bundle
        self._settings = settings
        self._arena = arena
        self._max_length = max_length

    def place(self, owner: Owner, entry: ModelEntry) -> CachedModel:
        graphs = {graph.role: graph for graph in entry.graphs if graph.backend == "cpu"}
        wanted = ("forward_native", "forward") if self._settings.library else ("forward",)
        graph = next((graphs[role] for role in wanted if role in graphs), None)
        if graph is None:
            raise BundleError(str(self._bundle.path), f"a forward graph for the CPU is required for the {owner}")
        max_length = min(self._max_length, entry.info.max_length)
        zone = self._arena.zone(owner, max_length)
        session = self.session(graph, self._settings.threads)
        max_rows = MAX_WINDOW + 1
        forward = ForwardSession(session, zone, entry.info.vocab_size, max_rows, PREFILL_CHUNK, graph.member)
        return CachedModel(forward, zone, max_length)

    def place_draft(self, strict: bool) -> tuple[CachedModel | None, str]:
        """The draft model if the bundle has one, or why it could not be loaded."""
        entry = self._bundle.manifest.draft.model
        if entry is None:
            return None, ""
        try:
            return self.place("draft", entry), ""
        except DscError as error:
            if strict:
                raise
            return None, str(error)

    def session(self, entry: GraphEntry, threads: int) -> object:
        return create_session(self._graph_bytes(entry.member), self._settings, entry.member, threads)

    def _graph_bytes(self, member: str) -> bytes:
        """The graph, with its weights in the bundle file by its present name."""
        name = os.path.basename(os.path.realpath(self._bundle.path))
        return relocate_graph(self._bundle.read(member), name, member)

    def tokenizer_files(self) -> dict[str, bytes]:
        members = self._bundle.manifest.tokenizer.members
        return {member.removeprefix("tokenizer/"): self._bundle.read(member) for member in members}
