"""The machine that a bundle runs on: onnxruntime, its provider, and the CPUs that this process may use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as state

from dsc.bundle_schema.errors import HostError, RequestError
from dsc.kernels.native import NativeLibrary
from dsc.runtime.arguments import whole_number
from dsc.runtime.host_cpus import allowed_cpus

MAX_THREADS = 1024

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_ERRORS_ONLY = 3
# onnxruntime's exceptions have no base of their own.
ORT_ERRORS = (
    state.EPFail,
    state.Fail,
    state.InvalidArgument,
    state.InvalidGraph,
    state.InvalidProtobuf,
    state.NoSuchFile,
    state.NotImplemented,
    state.RuntimeException,
    RuntimeError,
    ValueError,
)


@dataclass(frozen=True)
class SessionSettings:
    """How every session of one loaded bundle is made.

    Attributes:
        provider: ``cpu`` or ``cuda``.
        threads: intra-op threads of a forward session.
        weights_folder: the real directory of the bundle file, which holds the graphs' external weights.
        native: the project's own CPU kernels, or why they are not used.
        device: name of the device; empty for the CPU. `device_memory` is its bytes.
        provider_options: of onnxruntime.
    """

    provider: str
    threads: int
    weights_folder: str
    native: NativeLibrary
    device: str = ""
    device_memory: int | None = None
    provider_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def library(self) -> str | None:
        """Path of the custom-op library to register, None when the operators' bodies run."""
        return None if self.native.path is None else str(self.native.path)

    @property
    def kernels(self) -> str:
        """Who runs the project's own operators: ``native``, or ``ort`` by their bodies."""
        return "ort" if self.native.path is None else "native"


def choose_threads(requested: int | None) -> int:
    """`requested`, or one thread for each CPU that this process may use.

    Raises:
        RequestError: fewer than one, or more than any machine has use for.
    """
    return allowed_cpus() if requested is None else whole_number(requested, "threads", 1, MAX_THREADS)


def require_onnxruntime(minimum: str, where: str) -> None:
    """Compare the installed onnxruntime with what a bundle needs, before any session is made.

    Raises:
        HostError: the installed one is older.
    """
    if _version(ort.__version__) < _version(minimum):
        raise HostError(
            where,
            f"onnxruntime {minimum} or newer is required, got {ort.__version__}",
            f"pip install 'onnxruntime>={minimum}'",
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def require_provider(provider: str) -> str:
    """onnxruntime's name of a provider.

    Raises:
        RequestError: there is none of this name.
        HostError: the installed onnxruntime was built without it.
    """
    name = _PROVIDERS.get(provider) if isinstance(provider, str) else None
    if name is None:
        raise RequestError("provider", f"one of {', '.join(_PROVIDERS)} is required, got {provider!r}")
    if name not in ort.get_available_providers():
        raise HostError("provider", f"{name} is required, this onnxruntime has none", _hint(provider))
    return name


def create_session(graph: bytes, settings: SessionSettings, where: str, threads: int) -> ort.InferenceSession:
    """A session over serialised graph bytes on exactly the provider asked for.

    Raises:
        RequestError: an unknown provider name.
        HostError: the provider cannot be started here, or onnxruntime refuses the graph.
    """
    name = require_provider(settings.provider)
    provider_options = [dict(settings.provider_options)]
    if settings.provider == "cuda":
        _load_cuda_libraries()
    try:
        # Its own fall-back would print to stdout and try the same provider again.
        session = ort.InferenceSession(
            graph, _options(settings, threads), providers=[name], provider_options=provider_options, enable_fallback=0
        )
    except ORT_ERRORS as error:
        raise HostError(where, f"onnxruntime {ort.__version__} refused the graph: {error}") from error
    # onnxruntime falls back to the CPU without an error when a provider's libraries are missing.
    if session.get_providers()[0] != name:
        raise HostError("provider", f"{name} is required, it could not be started here", _hint(settings.provider))
    return session


def _load_cuda_libraries() -> None:
    """Load the libraries of NVIDIA's wheels: they lie in site-packages, where the system's loader does not look.

    What is missing is printed by onnxruntime, to standard output, and shows as an error when the provider starts.
    """
    with redirect_stdout(StringIO()):
        ort.preload_dlls(directory="")


def _options(settings: SessionSettings, threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", settings.weights_folder)
    # Threads spin between the operators of a run, and stop with it: target and draft take turns, and a pool that
    # spun on while another session works would take its CPU away.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if settings.provider == "cuda":  # where nodes run is asked for after
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if settings.library is not None:
        options.register_custom_ops_library(settings.library)
    return options


def _hint(provider: str) -> str:
    if provider == "cpu":
        return "pip install onnxruntime"
    return "pip install onnxruntime-gpu with its CUDA libraries, or load with provider='cpu'"
