"""`manifest.json`: what a bundle holds, where it came from and what it needs.

The manifest is the last member. Its table names every other member with offset, size and SHA-256, so one
small read tells all there is to know of a bundle of any size.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import FailFast, Field, JsonValue, model_validator

from dsc.bundle_schema.kv_plan import GraphBackend
from dsc.bundle_schema.model_info import ModelInfo
from dsc.bundle_schema.strict_json import dump_canonical, parse_strict
from dsc.bundle_schema.tensors import StrictModel, TensorSpec
from dsc.bundle_schema.weight_index import INDEX_NAME
from dsc.bundle_schema.zip_layout import WEIGHTS_NAME

MANIFEST_NAME: Final = "manifest.json"
MANIFEST_SCHEMA: Final = "1.1"

Name = Annotated[str, Field(min_length=1, max_length=1024)]
Text = Annotated[str, Field(max_length=65536)]
MemberName = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9._\-/]+$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
NBytes = Annotated[int, Field(ge=0, le=2**50)]
Number = Annotated[int, Field(ge=0, le=2**50)]
Version = Annotated[str, Field(pattern=r"^\d{1,6}(\.\d{1,6}){1,2}$")]

DraftKind = Literal["none", "model", "self", "ngram", "prefix", "mtp", "eagle3", "dflash", "dspark"]
_KINDS_WITHOUT_GRAPH = frozenset({"none", "ngram"})


class Member(StrictModel):
    """One member of the ZIP file: where its payload lies and what it must hash to.

    Attributes:
        offset: of the payload's first byte, from the start of the file.
        sha256: of the payload, lower-case hexadecimal.
    """

    name: MemberName
    offset: NBytes
    nbytes: NBytes
    sha256: Sha256


class KernelEntry(StrictModel):
    """One compiled kernel for one GPU architecture, with the metadata that its launch needs."""

    name: Name
    arch: Name
    member: MemberName
    metadata: dict[str, JsonValue] = Field(default_factory=dict)


class GraphEntry(StrictModel):
    """One ONNX graph.

    Attributes:
        role: ``forward``, ``verify_greedy``, ``verify_sampled`` and the like.
        operators: how often each ``domain::operator`` occurs, function bodies not counted.
        functions: operators of ours for which the graph carries a body in standard operators.
        n_parameters: elements in the initializers, shared ones included.
        precision: of the weights, e.g. ``fp32`` or ``int4``.
    """

    member: MemberName
    backend: GraphBackend
    role: Name
    ir_version: Annotated[int, Field(ge=1, le=1000)]
    opsets: dict[str, Annotated[int, Field(ge=1, le=10000)]]
    inputs: Annotated[tuple[TensorSpec, ...], FailFast()]
    outputs: Annotated[tuple[TensorSpec, ...], FailFast()]
    operators: dict[str, Number] = Field(default_factory=dict)
    functions: tuple[Name, ...] = ()
    n_parameters: Number = 0
    precision: Name = "fp32"


class ModelEntry(StrictModel):
    """A model and its graphs."""

    info: ModelInfo
    graphs: Annotated[tuple[GraphEntry, ...], FailFast()]

    def info_on(self, backend: GraphBackend) -> ModelInfo:
        """`info` as the graphs of `backend` have it, where there are some."""
        pools = (spec for graph in self.graphs if graph.backend == backend for spec in graph.inputs)
        dtype = next((spec.dtype for spec in pools if spec.name.startswith("k_pool.")), self.info.kv_dtype)
        return self.info.on_backend(backend, dtype)


class DraftEntry(StrictModel):
    """How tokens are drafted; `model` is there when drafting runs a graph.

    Attributes:
        n_shared: ids below this mean the same to draft and target, and only they may be proposed; None: all.
    """

    kind: DraftKind
    model: ModelEntry | None = None
    n_shared: Annotated[int, Field(ge=1, le=2**31)] | None = None

    @model_validator(mode="after")
    def _has_model_when_needed(self) -> Self:
        if (self.kind in _KINDS_WITHOUT_GRAPH) != (self.model is None):
            must = "must not" if self.model else "must"
            raise ValueError(f"a draft of kind {self.kind!r} {must} have a model")
        return self


class Requires(StrictModel):
    """The least that a runtime must offer."""

    min_onnxruntime: Version
    ir_version: Annotated[int, Field(ge=1, le=1000)]
    opsets: dict[str, Annotated[int, Field(ge=1, le=10000)]]


class TokenizerEntry(StrictModel):
    """The tokenizer's members and how the draft's token ids relate to the target's.

    Attributes:
        verdict: ``single`` when there is one tokenizer only, else what the pairing found,
            e.g. ``identical``, ``padded`` or ``mapped``.
        summary: the same for people: what differs, which ids are mapped.
    """

    members: tuple[MemberName, ...] = ()
    verdict: Name = "single"
    summary: Text = ""


class Manifest(StrictModel):
    """The whole manifest; see FORMAT.md.

    Attributes:
        created_by: tool name -> version, ``dsc`` at least. There is no clock: same input, same bytes.
        licences: ``target`` and ``draft`` -> licence.
        sources: ``target`` and ``draft`` -> provenance text.
        recipe: the effective recipe that compiled this bundle.
        kernels_left_out: GPU kernels that the recipe asked for and that do not exist -> the reason.
        members: every other member, in file order.
    """

    schema_version: Annotated[str, Field(pattern=r"^\d+\.\d+$")] = MANIFEST_SCHEMA
    kind: Literal["dsc-bundle"] = "dsc-bundle"
    name: Name
    created_by: dict[str, Name]
    licences: dict[str, Text] = Field(default_factory=dict)
    sources: dict[str, Text] = Field(default_factory=dict)
    recipe: dict[str, JsonValue] = Field(default_factory=dict)
    requires: Requires
    target: ModelEntry
    draft: DraftEntry
    tokenizer: TokenizerEntry = TokenizerEntry()
    # One wrong row is enough to refuse a table, and cheaper than a list of all that is wrong with it.
    members: Annotated[tuple[Member, ...], FailFast()] = ()
    kernels: Annotated[tuple[KernelEntry, ...], FailFast()] = ()
    kernels_left_out: dict[Name, Text] = Field(default_factory=dict)

    def member(self, name: str) -> Member | None:
        """The entry of the member's table with this name, None when there is none."""
        return next((member for member in self.members if member.name == name), None)

    def graphs(self) -> tuple[GraphEntry, ...]:
        """Every graph: the target's, then the draft's."""
        return self.target.graphs + (self.draft.model.graphs if self.draft.model else ())

    @model_validator(mode="after")
    def _references_resolve(self) -> Self:
        table = {member.name: member for member in self.members}
        if len(table) != len(self.members):
            raise ValueError("members: two entries have one name")
        if not self.members:  # a manifest that is not sealed yet
            return self
        for name, other in ((WEIGHTS_NAME, INDEX_NAME), (INDEX_NAME, WEIGHTS_NAME)):
            if name in table and other not in table:
                raise ValueError(f"{other} is required beside {name}")
        used = [graph.member for graph in self.graphs()] + [kernel.member for kernel in self.kernels]
        for name in (*used, *self.tokenizer.members):
            if name not in table:
                raise ValueError(f"{name} is used but is not in the members' table")
        return self


def parse_manifest(data: bytes, where: str = MANIFEST_NAME) -> Manifest:
    """Read a manifest; see `parse_strict` for what is refused.

    Raises:
        BundleError: of the kind that says what is wrong.
    """
    return parse_strict(Manifest, data, where, MANIFEST_SCHEMA)


def dump_manifest(manifest: Manifest) -> bytes:
    """The canonical bytes of a manifest."""
    return dump_canonical(manifest)
