"""What a compile is asked to do: one typed request, from flags, from a YAML recipe, or from Python."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dsc.bundle_schema.errors import RequestError
from dsc.kernels.gpu_targets import DEFAULT_ARCHITECTURES, Architecture, architectures

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_RECIPE_BYTES = 1 << 20


class Precision(StrEnum):
    """How weights are stored.

    ``keep`` carries the checkpoint's own form: the quantised blocks of a GGUF file, its other matrices in int8;
    float32 for a checkpoint without blocks. ``int8`` and ``int4`` carry blocks that have that width already:
    rounding them to it again costs accuracy for nothing. ``fp16`` halves the file and the KV pools only: on the CPU
    onnxruntime turns the weights back to float32 when it loads them, so neither speed nor memory is won.
    """

    KEEP = "keep"
    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"


class DraftKind(StrEnum):
    """Where proposals come from."""

    NONE = "none"
    NGRAM = "ngram"
    SELF = "self"
    MODEL = "model"


class Kernels(StrEnum):
    """Which CPU kernels the graph is written for.

    ``native`` keeps `ai.dspark` nodes with function bodies, so that dsc's own library runs them when it
    is there and onnxruntime's operators run when it is not. ``ort`` lowers to onnxruntime's operators.
    """

    NATIVE = "native"
    ORT = "ort"


class Backend(StrEnum):
    """What a bundle can run on. ``cpu`` is always in it: the gate measures the CPU graphs.

    ``cuda`` adds graphs in half precision and kernels, ``rocm`` kernels alone: onnxruntime hosts no graph there.
    """

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"


class CudaAttention(StrEnum):
    """Whose attention kernels the CUDA graphs are written for.

    ``ort``: onnxruntime's GroupQueryAttention. ``dspark`` writes a second graph whose attention is the bundle's own
    kernels, launched through a small library; where that is missing, the first graph runs.
    """

    ORT = "ort"
    DSPARK = "dspark"


_BACKEND_OF = {"cuda": Backend.CUDA, "hip": Backend.ROCM}
_DEFAULT_ARCHS = {Backend.CUDA: DEFAULT_ARCHITECTURES, Backend.ROCM: ("gfx942", "gfx950")}


def _listed(value: Any) -> Any:
    """A comma-separated text as a list."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _with_cpu(backends: tuple[Backend, ...]) -> tuple[Backend, ...]:
    return tuple(backend for backend in Backend if backend is Backend.CPU or backend in backends)


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# YAML has numbers and truth values of its own: neither is taken for the other, nor is a text for one of them.
Whole = Annotated[int, Field(strict=True)]
Positions = Annotated[Whole, Field(ge=8, le=1 << 24)]
Flag = Annotated[bool, Field(strict=True)]


class WeightOptions(_Options):
    """Quantisation of the MatMul weights."""

    precision: Precision = Precision.KEEP
    head_precision: Literal["int4", "int8", "fp32"] | None = Field(
        None, description="lm_head: int4, int8 or fp32; default int8"
    )
    block_size: Literal[32, 64, 128] = Field(32, description="weights a scale: 32, 64 or 128")
    exclude: tuple[str, ...] = Field((), description="name patterns of weights left in float")

    def of_blocks(self) -> list[str]:
        """The options given that say how weights become blocks of integers."""
        own_head = self.head_precision is not None and self.head_precision != self.precision
        given = {"head_precision": own_head, "block_size": self.block_size != 32, "exclude": self.exclude}
        return [name for name, value in given.items() if value]

    @model_validator(mode="after")
    def _blocks_are_made(self) -> Self:
        if (unused := self.of_blocks()) and self.precision in (Precision.FP32, Precision.FP16):
            raise ValueError(f"{unused[0]} needs a precision of int4, int8 or keep, got {self.precision}")
        return self


class DraftOptions(WeightOptions):
    """The draft: its kind, and for a model its source."""

    kind: DraftKind = DraftKind.NGRAM
    source: Path | None = None
    max_length: Positions | None = Field(None, description="positions of a draft whose files do not state them")

    @model_validator(mode="after")
    def _source_fits_kind(self) -> DraftOptions:
        if self.kind is DraftKind.MODEL and self.source is None:
            raise ValueError("a draft of kind `model` needs `source`, the path of its checkpoint")
        if self.kind is not DraftKind.MODEL and self.source is not None:
            raise ValueError(f"a draft of kind `{self.kind}` takes no `source`")
        if self.kind is not DraftKind.MODEL and self.max_length is not None:
            raise ValueError(f"a draft of kind `{self.kind}` takes no `max_length`")
        if self.kind in (DraftKind.NONE, DraftKind.NGRAM) and (
            self.precision is not Precision.KEEP or self.of_blocks()
        ):
            raise ValueError(f"a draft of kind `{self.kind}` has no weights, and no `precision` of them")
        return self


class PassOptions(_Options):
    """Graph passes: the pipeline's text, and what to print or write between them."""

    pipeline: str | None = Field(None, description="a,b{option=1}; default: the backend's own pipeline")
    dump_after: tuple[str, ...] = ()
    dump_dir: Path | None = None

    @model_validator(mode="after")
    def _something_is_dumped(self) -> Self:
        if self.dump_dir is not None and not self.dump_after:
            raise ValueError("dump_dir needs dump_after, the passes after which a graph is written")
        return self


class GateOptions(_Options):
    """What is measured before the bundle is sealed."""

    strict: Flag = Field(True, description="refuse to emit a bundle whose certificate fails")
    n_prompts: Annotated[Whole, Field(ge=1, le=1000)] = 4
    n_tokens: Annotated[Whole, Field(ge=8, le=4096)] = 48
    n_draws: Annotated[Whole, Field(ge=0, le=100_000)] = 400


class CompileRequest(_Options):
    """All that `dsc compile` needs to know; the effective request is stored in the bundle."""

    target: Path
    output: Path
    name: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    weights: WeightOptions = WeightOptions()
    draft: DraftOptions = DraftOptions()
    max_length: Positions | None = None
    eos_ids: tuple[Annotated[Whole, Field(ge=0)], ...] | None = Field(
        None, description="end tokens of an ONNX target, in place of what its files state"
    )
    n_slots: Annotated[Whole, Field(ge=1, le=256)] = 1
    window: Annotated[Whole, Field(ge=1, le=16)] = 4
    kernels: Kernels = Kernels.NATIVE
    backends: Annotated[tuple[Backend, ...], BeforeValidator(_listed), AfterValidator(_with_cpu)] = (Backend.CPU,)
    archs: Annotated[tuple[str, ...] | None, BeforeValidator(_listed)] = Field(
        None, description="GPU architectures of the kernels; default: all that are known for the backends"
    )
    cuda_attention: CudaAttention = CudaAttention.ORT
    passes: PassOptions = PassOptions()
    gate: GateOptions = GateOptions()
    threads: Annotated[Whole, Field(ge=1, le=1024)] | None = None
    reproducible: Flag = Field(False, description="leave measured times out: same input, same bytes")
    force: Flag = False

    @model_validator(mode="after")
    def _gpu_options_fit_backends(self) -> CompileRequest:
        served = {_BACKEND_OF[target.backend]: target.name for target in self.gpu_architectures()}
        for backend, name in served.items():
            if backend not in self.backends:
                raise ValueError(f"archs: {name} needs the backend `{backend}`, got {', '.join(self.backends)}")
        for backend in self.backends:
            if backend in _DEFAULT_ARCHS and backend not in served:
                raise ValueError(f"archs: the backend `{backend}` needs one of {', '.join(_DEFAULT_ARCHS[backend])}")
        if self.cuda_attention is CudaAttention.DSPARK and Backend.CUDA not in self.backends:
            raise ValueError(f"cuda_attention: `dspark` needs the backend `cuda`, got {', '.join(self.backends)}")
        return self

    def gpu_architectures(self) -> tuple[Architecture, ...]:
        """The architectures that kernels are compiled for: those asked for, or all of the GPU backends.

        Raises:
            KernelError: an architecture is not known; the message lists those that are.
        """
        if self.archs:
            return architectures(self.archs)
        names = tuple(name for backend in self.backends for name in _DEFAULT_ARCHS.get(backend, ()))
        return architectures(names) if names else ()

    def recipe(self) -> dict[str, Any]:
        """The request as JSON-able data, without the paths of the machine that compiled."""
        data = self.model_dump(mode="json", exclude={"output", "force", "threads"})
        data["target"] = self.target.name
        data["archs"] = [target.name for target in self.gpu_architectures()]
        data["passes"].pop("dump_dir")
        if self.draft.source is not None:
            data["draft"]["source"] = self.draft.source.name
        return data


class _Recipe(yaml.SafeLoader):
    """YAML in which a key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def load_recipe(path: Path) -> dict[str, Any]:
    """Read a YAML recipe as nested options.

    Raises:
        RequestError: the file cannot be read, is too large, is no YAML or holds no mapping.
    """
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise RequestError(str(path), f"a recipe has at most {MAX_RECIPE_BYTES} bytes")
        data = _Recipe(path.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise RequestError(str(path), f"cannot read the recipe: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RequestError(str(path), f"the recipe is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise RequestError(str(path), f"a recipe is a mapping of options, got {type(data).__name__}")
    return data


def merge_options(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """`override` over `base`, mapping by mapping; a None in `override` means "not given".

    Something else in `base` where `override` has a mapping stays, to be refused.
    """
    merged = dict(base)
    for key, value in override.items():
        own = merged.get(key)
        if isinstance(value, dict) and isinstance(own, dict | None):
            merged[key] = merge_options(own or {}, value)
        elif value is not None and not isinstance(value, dict):
            merged[key] = value
    return merged


def build_request(options: dict[str, Any], where: str = "request") -> CompileRequest:
    """Validate nested options into a request.

    Raises:
        RequestError: an option is unknown, missing or out of range; every such field is named.
    """
    try:
        return CompileRequest.model_validate(options)
    except ValidationError as error:
        problems = "; ".join(_problem(one) for one in error.errors())
        raise RequestError(where, problems, "see `dsc compile --help` and docs/reference/recipe.md") from error


def _problem(found: ErrorDetails) -> str:
    place = ".".join(str(part) for part in found["loc"]) or "request"
    got = "" if found["type"] in ("missing", "value_error") else f", got {str(found['input'])[:80]!r}"
    return f"{place}: {found['msg'].removeprefix('Value error, ')}{got}"
