"""What is refused before any work is done, because it would fail at its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dsc.bundle_schema.errors import RequestError
from dsc.bundle_schema.zip_layout import external_location
from dsc.compiler.doctor import require_compile_packages
from dsc.kernels.aot import compiler_version
from dsc.passes.pipeline import load_pass, parse_pipeline
from dsc.passes.quantize_weights import QuantizeWeightsPass

if TYPE_CHECKING:
    from dsc.compiler.request import CompileRequest

BUNDLE_SUFFIX = ".dsmodel"
EVERY_PASS = "all"
"""In place of a pass: the graph is written after every one."""


def check_request(request: CompileRequest) -> None:
    """Refuse, before any work, what would fail at its end.

    Raises:
        RequestError: the output exists and is not to be replaced, is a checkpoint or no bundle, or has no folder; there
            is no such pass or folder for dumps; a pattern of weights is no regular expression.
        HostError: a package of the `[compile]` extra is missing, or for GPU kernels Triton.
    """
    try:
        _check_output(request)
    except OSError as error:  # a name that is too long, say
        raise RequestError(str(request.output), f"cannot be written: {error.strerror}") from error
    require_compile_packages()
    _check_passes(request)
    if request.gpu_architectures():
        compiler_version()


def _check_output(request: CompileRequest) -> None:
    output = request.output
    external_location(output.name)
    if output.is_dir():
        raise RequestError(str(output), "a file is required for the bundle, got a folder")
    if any(output.exists() and source.exists() and output.samefile(source) for source in _sources(request)):
        raise RequestError(str(output), "the bundle must not replace the checkpoint that it is made of")
    if output.exists() and output.suffix != BUNDLE_SUFFIX:  # a checkpoint's file, perhaps
        raise RequestError(str(output), f"only a {BUNDLE_SUFFIX} file may be replaced", "give another --output")
    if output.exists() and not request.force:
        raise RequestError(str(output), "the file exists", "give --force to replace it")
    if not _is_writable(output.parent):
        raise RequestError(str(output.parent), "a folder that can be written is required for the bundle")


def _sources(request: CompileRequest) -> tuple[Path, ...]:
    return (request.target,) if request.draft.source is None else (request.target, request.draft.source)


def _check_passes(request: CompileRequest) -> None:
    options = request.passes
    parse_pipeline(options.pipeline or "")
    for name in options.dump_after:
        if name != EVERY_PASS:
            load_pass(name)
    folder = options.dump_dir or Path()
    if options.dump_after and not _is_writable(folder):
        raise RequestError("--dump-dir", f"a folder that can be written is required, got {folder}")
    for weights in (request.weights, request.draft):
        QuantizeWeightsPass(exclude=weights.exclude)


def _is_writable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK)
