"""From a `.dsmodel` file to a model that generates: check, map, plan, place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from dsc.bundle_schema.certificate import CERTIFICATE_NAME, Certificate, parse_certificate
from dsc.bundle_schema.container import OpenBundle, open_bundle
from dsc.bundle_schema.dflash_config import DFLASH_CONFIG_NAME, parse_config
from dsc.bundle_schema.errors import CheckFailed, HostError, RequestError
from dsc.bundle_schema.kv_layout import resized, without_rings
from dsc.bundle_schema.kv_plan import PLAN_NAMES, GraphBackend, KvPlan, check_plan, parse_plan
from dsc.bundle_schema.manifest import GraphEntry
from dsc.kernels.cuda_op import find_cuda_op
from dsc.kernels.native import NativeLibrary, find_library_for
from dsc.runtime.arguments import file_path, flag, whole_number
from dsc.runtime.cuda_placer import CudaPlacer
from dsc.runtime.generate import LoadedBundle, SpeculativeModel
from dsc.runtime.host import SessionSettings, choose_threads, require_onnxruntime, require_provider
from dsc.runtime.kv_arena import KvArena
from dsc.runtime.placer import Placer, forward_graph
from dsc.runtime.resources import apply_profile, choose_profile, describe_profile, device_facts
from dsc.runtime.text import TextCodec
from dsc.runtime.verified_files import VerifyMode, verify_bundle

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
        kernels: ``native`` requires the project's own library for the provider, ``ort`` does without, ``auto`` takes
            it if there.
        strict: a draft that cannot be loaded is an error; otherwise the model decodes plainly and its statistics say
            why.
        certified: refuse a bundle whose certificate's verdict is not ``pass``, or was measured with other kernels than
            run here.
        override: JSON file of changes to the schedule (dotted path -> value), read again between rounds when it
            changes; a bad one is reported in the statistics and not taken.

    Raises:
        BundleError: the file is not a sound bundle, or is too new.
        HostError: onnxruntime is too old, or provider or kernels are not available here.
        PlanError: the KV plan does not fit the models.
        CheckFailed: `certified`, and the certificate says otherwise.
        RequestError: an argument is wrong.
    """
    flag(strict, "strict")
    flag(certified, "certified")
    override_file = None if override is None else file_path(override, "override")
    bundle = open_bundle(path)
    manifest = bundle.manifest
    require_onnxruntime(manifest.requires.min_onnxruntime, str(path))
    verify_bundle(bundle, verify)
    certificate = parse_certificate(bundle.read(CERTIFICATE_NAME))
    config = parse_config(bundle.read(DFLASH_CONFIG_NAME))
    settings = _settings(bundle, provider, threads, kernels)
    if certified:
        _require_pass(certificate, settings, str(path))
    forward_graph(bundle, provider, "target", manifest.target, "forward")
    plan = _plan(bundle, "cuda" if provider == "cuda" else "cpu")
    limit = _limit(plan, max_length)
    plan = resized(plan if settings.library else without_rings(plan), limit, plan.n_slots)
    if provider == "cuda":
        placer: Placer = CudaPlacer(bundle, settings, plan, config.secure_rollback, limit, kernels == "native")
    else:
        placer = Placer(bundle, settings, KvArena(plan, config.secure_rollback), limit)
    target = placer.place("target", manifest.target)
    facts = device_facts(placer.settings)
    profile = choose_profile(config, facts)
    config = apply_profile(config, profile)
    if profile is not None and not profile.draft:
        draft, draft_failure = None, f"the profile {profile.name!r} leaves the draft model out"
    else:
        draft, draft_failure = placer.place_draft(target, strict)
    return SpeculativeModel(
        LoadedBundle(
            manifest=manifest,
            config=config,
            certificate=certificate,
            arena=placer.arena,
            settings=placer.settings,
            tail=placer.tail,
            target=target,
            draft=draft,
            draft_failure=draft_failure,
            profile=describe_profile(config, profile, facts),
            codec=TextCodec(_tokenizer_files(bundle)) if manifest.tokenizer.members else None,
            max_length=limit,
            override=override_file,
        )
    )


def _require_pass(certificate: Certificate, settings: SessionSettings, where: str) -> None:
    """Raise CheckFailed unless the certificate says ``pass`` of what runs here; all are measured on the CPU."""
    if certificate.verdict != "pass":
        what = f"a certificate that says 'pass' is required, got {certificate.verdict!r}"
        raise CheckFailed(where, what, "; ".join(certificate.reasons))
    if (certificate.kernels, "cpu") != (settings.kernels, settings.provider):
        wanted, found = f"{settings.kernels} kernels on {settings.provider}", f"{certificate.kernels} kernels on cpu"
        what = f"a certificate of {wanted} is required, got one of {found}"
        raise CheckFailed(where, what, _as_measured(certificate, settings))


def _as_measured(certificate: Certificate, settings: SessionSettings) -> str:
    """What would make the bundle run as its certificate was measured."""
    if settings.provider != "cpu":
        return "no certificate is measured there: load with provider='cpu', or without certified"
    if certificate.kernels == "ort":
        return "load with kernels='ort', or compile it here"
    return f"the native kernels do not run: {settings.native.reason}"


def _settings(bundle: OpenBundle, provider: str, threads: int | None, kernels: KernelChoice) -> SessionSettings:
    if kernels not in ("auto", "native", "ort"):
        raise RequestError("kernels", f"'auto', 'native' or 'ort' is required, got {kernels!r}")
    require_provider(provider)
    library = NativeLibrary(None, "not asked for")
    if kernels != "ort":
        graphs = [graph for graph in bundle.manifest.graphs() if graph.backend == provider]
        ours = any(graph.role == "forward_native" or (graph.functions and graph.role == "forward") for graph in graphs)
        library = (
            _library(provider, graphs)
            if ours
            else NativeLibrary(None, "the bundle's graphs have none of its operators")
        )
    if kernels == "native" and library.path is None:
        raise HostError("kernels", f"the native library is required: {library.reason}", "load with kernels='auto'")
    folder = os.path.dirname(os.path.realpath(bundle.path))
    return SessionSettings(provider, choose_threads(threads), folder, library)


def _library(provider: str, graphs: Sequence[GraphEntry]) -> NativeLibrary:
    """The library that runs a bundle's graphs for it, or why there is none."""
    if provider != "cpu":
        return find_cuda_op()
    return find_library_for({name for graph in graphs if graph.role == "forward_native" for name in graph.operators})


def _plan(bundle: OpenBundle, backend: GraphBackend) -> KvPlan:
    """The backend's KV plan, checked against what its graphs need."""
    manifest = bundle.manifest
    plan = parse_plan(bundle.read(PLAN_NAMES[backend]))
    draft = manifest.draft.model
    check_plan(plan, manifest.target.info_on(backend), draft.info_on(backend) if draft else None)
    return plan


def _limit(plan: KvPlan, max_length: int | None) -> int:
    if max_length is None:
        return plan.max_length
    hint = f"the bundle was compiled for {plan.max_length}; compile with a larger maximum length"
    return whole_number(max_length, "max_length", 2, plan.max_length, hint)


def _tokenizer_files(bundle: OpenBundle) -> dict[str, bytes]:
    members = bundle.manifest.tokenizer.members
    return {member.removeprefix("tokenizer/"): bundle.read(member) for member in members}
