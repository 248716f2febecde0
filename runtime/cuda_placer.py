"""Models on a CUDA device: one stream for graphs, kernels and copies, one allocation for keys and values."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from dsc.bundle_schema.container import OpenBundle
from dsc.bundle_schema.errors import HostError, KernelError
from dsc.bundle_schema.kv_plan import KvPlan, Owner
from dsc.bundle_schema.manifest import GraphEntry, ModelEntry
from dsc.kernels.bundle_members import launch_records
from dsc.kernels.cuda_op import state_table
from dsc.kernels.native import NativeLibrary
from dsc.runtime.cached_model import CachedModel
from dsc.runtime.cuda_driver import CudaDriver
from dsc.runtime.cuda_session import CudaForward
from dsc.runtime.cuda_stream import CudaStream
from dsc.runtime.device_arena import DeviceArena
from dsc.runtime.device_attention import DeviceAttention
from dsc.runtime.device_draft import DeviceDraftModel
from dsc.runtime.device_kernels import DeviceKernels
from dsc.runtime.device_verify import DeviceTail
from dsc.runtime.host import SessionSettings
from dsc.runtime.placer import MAX_ROWS, PREFILL_CHUNK, Placer, forward_graph

# Operators that work on activations: where they run is where the model runs.
_HEAVY = frozenset(
    {"MatMul", "FusedMatMul", "MatMulNBits", "Gemm", "GroupQueryAttention", "VerifyAttention", "MoE", "QMoE"}
)


class CudaPlacer(Placer):
    """Makes sessions from the bundle's CUDA graphs, all on one stream, and binds them to an arena on the device.

    Args:
        bundle: has graphs for ``cuda``.
        settings: without the device.
        plan: of the CUDA graphs.
        secure_rollback: overwrite rejected rows with zeros.
        max_length: most tokens of a sequence.
        native: attention by the bundle's own kernels is required; otherwise it is taken where the bundle has graphs
            for it, and `settings` of this object say why not.

    Raises:
        HostError: there is no driver or no device, it has not enough memory, or `native` cannot be had.
        BundleError: the bundle's kernels are not what its manifest says.
    """

    def __init__(
        self,
        bundle: OpenBundle,
        settings: SessionSettings,
        plan: KvPlan,
        secure_rollback: bool,
        max_length: int,
        native: bool = False,
    ) -> None:
        manifest = bundle.manifest
        driver = CudaDriver()
        self._stream = CudaStream(driver)
        options = {"device_id": str(driver.ordinal), "user_compute_stream": str(self._stream.handle)}
        settings = replace(
            settings, device=driver.device.name, device_memory=driver.total_memory(), provider_options=options
        )
        self._native_required = native
        self._device_arena = DeviceArena(plan, self._stream, secure_rollback)
        super().__init__(bundle, settings, self._device_arena, max_length)
        self._kernels = DeviceKernels(driver, launch_records(manifest.kernels), bundle.read)
        self.tail = DeviceTail(self._kernels, self._stream, manifest.target.info.vocab_size, MAX_ROWS)

    def place(self, owner: Owner, entry: ModelEntry) -> CachedModel:
        """See `Placer.place`."""
        attention = self._attention(owner, entry)
        graph = forward_graph(self._bundle, "cuda", owner, entry, "forward_native" if attention else "forward")
        max_length = min(self._max_length, entry.info.max_length)
        zone = self._device_arena.zone(owner, max_length)
        settings = self.settings
        if attention is None:
            settings = replace(settings, native=NativeLibrary(None, ""))
        else:
            state_table(settings.native, attention.table)
        session = self.session(graph, settings)
        forward = CudaForward(
            session,
            zone.device_pools,
            entry.info.vocab_size,
            MAX_ROWS,
            PREFILL_CHUNK,
            graph.member,
            self._stream,
            attention,
        )
        if owner == "target":
            return CachedModel(forward, zone, max_length)
        tail = DeviceTail(self._kernels, self._stream, entry.info.vocab_size, 1)
        return DeviceDraftModel(forward, zone, max_length, tail, MAX_ROWS)

    def _attention(self, owner: Owner, entry: ModelEntry) -> DeviceAttention | None:
        """The kernels that the model's own attention nodes launch; None where onnxruntime's attention runs."""
        graphs = [graph for graph in entry.graphs if (graph.backend, graph.role) == ("cuda", "forward_native")]
        if not graphs or self.settings.library is None:
            return None
        try:
            return DeviceAttention(self._kernels, self._stream, entry.info_on("cuda"))
        except KernelError as error:
            if self._native_required:
                raise HostError("kernels", f"the bundle's attention kernels are required: {error}") from error
            self.settings = replace(self.settings, native=NativeLibrary(None, f"in the {owner}, {error}"))
            return None

    def session(self, entry: GraphEntry, settings: SessionSettings) -> Any:
        """A session whose heavy operators all run on the device.

        Raises:
            HostError: onnxruntime has put one on the CPU.
        """
        session = super().session(entry, settings)
        strays = Counter(op for op in host_operators(session) if op in _HEAVY)
        if strays:
            what = ", ".join(f"{count} {op}" for op, count in sorted(strays.items()))
            raise HostError(entry.member, f"onnxruntime would run {what} on the CPU, CUDA is required")
        return session


def host_operators(session: Any) -> list[str]:
    """Types of the nodes that a CUDA session runs on the CPU, by onnxruntime's own report."""
    parts = session.get_provider_graph_assignment_info()
    return [node.op_type for part in parts if part.ep_name == "CPUExecutionProvider" for node in part.get_nodes()]
