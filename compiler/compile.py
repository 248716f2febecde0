"""The compiler as a table of contents: import, export, pair, passes, plan, kernels, emit, gate, seal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from dsc.bundle_schema.certificate import Certificate, TokenizerCheck
from dsc.bundle_schema.dflash_config import MAX_WINDOW, DflashConfig, Proposer, Windows
from dsc.bundle_schema.errors import CheckFailed
from dsc.bundle_schema.manifest import TokenizerEntry
from dsc.compiler.build_graphs import BuiltModel, build_graphs
from dsc.compiler.compile_report import CompileReport
from dsc.compiler.emit import BundleContents, GraphPart, ModelPart, emit_bundle
from dsc.compiler.gate import GateResult, run_gate
from dsc.compiler.gate_checks import Reference
from dsc.compiler.gpu_kernels import GpuKernels, attention_needs, compile_gpu_kernels
from dsc.compiler.onnx_facts import StatedFacts
from dsc.compiler.plan_kv import may_share, plan_kv
from dsc.compiler.request import CompileRequest, DraftKind, Precision
from dsc.compiler.request_checks import check_request
from dsc.compiler.sources import Source, load_source
from dsc.compiler.stages import StageLog
from dsc.compiler.staging import held, seal, staged
from dsc.runtime.host import choose_threads

if TYPE_CHECKING:
    from dsc.bundle_schema.kv_plan import GraphBackend, KvPlan
    from dsc.compiler.exported import ExportedModel
    from dsc.compiler.pairing import Pairing

TOOLS = ("dsc-toolchain", "torch", "transformers", "onnx", "onnx-ir", "onnxruntime")


@dataclass(frozen=True)
class ExportedPair:
    """Target and draft as forward graphs, and what the framework computes with the target, where there is one."""

    target: ExportedModel
    draft: ExportedModel | None
    reference: Reference | None


def compile_bundle(request: CompileRequest, on_stage: Callable[[str, int, int], None] | None = None) -> CompileReport:
    """Compile a target and its draft into the bundle at ``request.output``.

    Args:
        on_stage: called with name, index and number of stages as each begins.

    Raises:
        RequestError, ModelError, PairError, PassError, PlanError: the input cannot be compiled.
        CheckFailed: the gate's verdict is no and the request is strict. Nothing is written.
    """
    check_request(request)
    log = StageLog(on_stage)
    with log.stage("import"):
        target_source, draft_source = load_sources(request)
    with log.stage("export"):
        pair = export_pair(request, target_source, draft_source)
    with log.stage("pair"):
        pairing = pair_tokenizers(pair)
    with log.stage("passes"):
        target = build_graphs("target", pair.target, request.weights, request)
        draft = build_graphs("draft", pair.draft, request.draft, request) if pair.draft else None
    with log.stage("plan"):
        plans = plan_pair(request, target, draft)
    with log.stage("kernels"):
        models = [model.part for model in (target, draft) if model is not None]
        needs = attention_needs((part.info, part.graphs[0].model) for part in models)
        gpu = compile_gpu_kernels(needs, request.gpu_architectures(), choose_threads(request.threads))
        missing = {**target.left_out, **(draft.left_out if draft else {})}
        gpu = replace(gpu, left_out={**gpu.left_out, **missing})
    contents = bundle_contents(request, pair, target, draft, plans, pairing, gpu)
    with staged(request.output) as staging:
        with log.stage("emit"):
            emit_bundle(staging, contents)
        with held(staging):
            with log.stage("gate"):
                result = run_gate(
                    staging,
                    request.gate,
                    request.window,
                    pair.reference,
                    _tokenizer_check(pairing),
                    exact_weights=target.part.info.quantization == Precision.FP32,
                    threads=request.threads,
                )
            with log.stage("seal"):
                refuse_failed(request, result)
                seal(staging, request.output, contents, result, with_costs=not request.reproducible)
    reports = {**target.reports, **(draft.reports if draft else {})}
    notes = collect_notes(pair, target, draft, gpu)
    return CompileReport.of(request, tuple(log.reports), reports, result, notes)


def collect_notes(pair: ExportedPair, target: BuiltModel, draft: BuiltModel | None, gpu: GpuKernels) -> tuple[str, ...]:
    """What a person should know of the bundle, each thing once."""
    parts = [pair.target, target, *((pair.draft, draft) if pair.draft and draft else ())]
    notes = [note for part in parts for note in part.notes]
    if not pair.target.tokenizer:
        notes.append("the target has no tokenizer.json: the bundle takes and gives token ids only")
    notes += [f"{kernels} left out: {why}" for kernels, why in gpu.left_out.items()]
    if gpu.kernels:
        notes.append("GPU graphs and kernels were compiled, not run: the certificate is that of the CPU graphs")
    return tuple(dict.fromkeys(notes))


def load_sources(request: CompileRequest) -> tuple[Source, Source | None]:
    """Read the checkpoints; a `self` draft has none of its own."""
    target = load_source(request.target, StatedFacts(request.max_length, request.eos_ids))
    if request.draft.source is None:
        return target, None
    return target, load_source(request.draft.source, StatedFacts(request.draft.max_length, eos_ids=()))


def export_pair(request: CompileRequest, target: Source, draft: Source | None) -> ExportedPair:
    """Export both models; a `self` draft is the target's own graph, given other weights later."""
    reference = target.reference()
    exported = target.export()
    if request.draft.kind is DraftKind.SELF:
        return ExportedPair(exported, exported, reference)
    return ExportedPair(exported, draft.export() if draft is not None else None, reference)


def pair_tokenizers(pair: ExportedPair) -> Pairing | None:
    """Whether the draft's ids mean what the target's mean; nothing to compare for one model.

    Raises:
        PairError: the tokenizers differ.
    """
    if pair.draft is None or pair.draft is pair.target:
        return None
    from dsc.compiler.pairing import pair as pair_models

    target, draft = pair.target, pair.draft
    return pair_models(target.tokenizer, draft.tokenizer, target.info.vocab_size, draft.info.vocab_size)


def plan_pair(request: CompileRequest, target: BuiltModel, draft: BuiltModel | None) -> dict[GraphBackend, KvPlan]:
    """One arena for both on each backend that has graphs; a draft with fewer positions is not asked past them.

    A draft of the target's own weights continues the target's cache on the CPU.
    """
    plans = {}
    for backend in dict.fromkeys(graph.backend for graph in target.part.graphs):
        reader = target.part.info_on(backend)
        drafter = draft.part.info_on(backend) if draft is not None else None
        own_weights = request.draft.kind is DraftKind.SELF and backend == "cpu"
        shared = own_weights and drafter is not None and may_share(reader, drafter)
        length = request.max_length or reader.max_length
        plans[backend] = plan_kv(reader, drafter, length, MAX_WINDOW + 1, request.n_slots, shared)
    return plans


def bundle_contents(
    request: CompileRequest,
    pair: ExportedPair,
    target: BuiltModel,
    draft: BuiltModel | None,
    plans: dict[GraphBackend, KvPlan],
    pairing: Pairing | None,
    gpu: GpuKernels,
) -> BundleContents:
    """Everything that is emitted, with a certificate that says nothing yet."""
    sources = {"target": pair.target.source}
    licences = {"target": pair.target.info.licence or "not stated"}
    if request.draft.kind is DraftKind.MODEL and pair.draft is not None:
        sources["draft"] = pair.draft.source
        licences["draft"] = pair.draft.info.licence or "not stated"
    name = request.name or request.output.stem
    unmeasured = Certificate(verdict="not_strict", reasons=("not measured",), device="none")
    return BundleContents(
        name=name,
        target=ModelPart(target.part.info, (*target.part.graphs, *verify_graphs())),
        draft_kind=request.draft.kind.value,
        draft=draft.part if draft is not None else None,
        tokenizer=pair.target.tokenizer,
        tokenizer_verdict=pairing.entry(()) if pairing is not None else TokenizerEntry(),
        n_shared=pairing.n_shared if pairing is not None else None,
        plans=plans,
        config=dflash_config(request),
        certificate=unmeasured,
        recipe=request.recipe(),
        sources=sources,
        licences=licences,
        created_by={tool.removesuffix("-toolchain"): metadata.version(tool) for tool in TOOLS} | gpu.made_by(),
        gpu=gpu,
    )


def verify_graphs() -> tuple[GraphPart, ...]:
    """The tails that judge drafts by logits, for runtimes that keep the logits on a device."""
    from dsc.kernels.tail_graphs import greedy_tail, sampled_tail

    return (
        GraphPart("verify/greedy.onnx", "verify_greedy", greedy_tail(), "fp32"),
        GraphPart("verify/sampled.onnx", "verify_sampled", sampled_tail("deterministic", penalties=True), "fp32"),
    )


def dflash_config(request: CompileRequest) -> DflashConfig:
    """The schedule that the request asks for; its cost curve is measured by the gate."""
    kinds: dict[Any, Proposer] = {"ngram": Proposer()} if request.draft.kind is not DraftKind.NONE else {}
    if request.draft.kind in (DraftKind.SELF, DraftKind.MODEL):
        kinds[request.draft.kind.value] = Proposer()
    if kinds:
        kinds["cache"] = Proposer(enabled=False)  # it keeps texts of one request for the next: to be asked for
    windows = Windows(default=request.window, min=min(2, request.window), max=max(8, request.window))
    return DflashConfig(windows=windows, proposers=kinds)


def refuse_failed(request: CompileRequest, result: GateResult) -> None:
    """Stop a strict compile whose certificate fails.

    Raises:
        CheckFailed: with the reasons.
    """
    if request.gate.strict and result.certificate.verdict != "pass":
        raise CheckFailed(
            str(request.output),
            f"the gate refuses this bundle: {'; '.join(result.certificate.reasons)}",
            "--no-strict writes it with the failed certificate inside",
        )


def _tokenizer_check(pairing: Pairing | None) -> TokenizerCheck | None:
    if pairing is None or pairing.verdict is None:
        return None
    verdict = pairing.verdict
    return TokenizerCheck(
        verdict=pairing.relation,
        n_target=verdict.n_target,
        n_draft=verdict.n_draft,
        n_mapped=pairing.n_shared,
        first_difference=verdict.notes[0] if verdict.notes else "",
    )
