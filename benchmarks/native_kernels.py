"""Times the native CPU kernels against ONNX Runtime's own, at the shapes of SmolLM2-135M.

Both run in one process, in turn, with inputs and outputs bound; the figures are medians of the ratio of neighbouring
runs, so a machine that is busy with other work for a while slows both.  `cpu` times count the calling thread's CPU
time of one-thread sessions; `wall` times are of the given number of threads.

    python benchmarks/native_kernels.py --threads 2 --json native_kernels.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from dsc.kernels import native
from dsc.kernels.interleave import interleave_codes, interleave_factors

MATMULS = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152))  # qkv, o, gate and up, down, head
ROWS = (1, 2, 4, 5, 8, 16, 512)
PASTS, QUERIES = (64, 512, 2048), (1, 5, 8)
HEADS, KV_HEADS, SIZE, POOL = 9, 3, 64, 4096
ROUNDS, SECONDS = 11, 0.03


def session_of(model: onnx.ModelProto, threads: int, library: Path | None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if library is not None:
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def model_of(node: onnx.NodeProto, inputs: dict[str, Any], weights: dict[str, Any] | None = None) -> onnx.ModelProto:
    def info(name: str, array: Any) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)

    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
    constants = [onnx.numpy_helper.from_array(value, name) for name, value in (weights or {}).items()]
    graph = helper.make_graph([node], "one", [info(*item) for item in inputs.items()], outputs, constants)
    imports = [helper.make_opsetid(*item) for item in (("", 21), ("ai.dspark", 1), ("com.microsoft", 1))]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def runner(session: ort.InferenceSession, inputs: dict[str, Any], outputs: dict[str, Any]) -> Callable[[], None]:
    binding = session.io_binding()
    for bind, values in ((binding.bind_ortvalue_input, inputs), (binding.bind_ortvalue_output, outputs)):
        for name, value in values.items():
            bind(name, value if isinstance(value, ort.OrtValue) else ort.OrtValue.ortvalue_from_numpy(value))
    return lambda: session.run_with_iobinding(binding)


def compare(own: Callable[[], None], other: Callable[[], None], clock: Callable[[], float]) -> dict[str, float]:
    """Microseconds of both and the median ratio other / own."""

    def timed(run: Callable[[], None], times: int) -> float:
        start = clock()
        for _ in range(times):
            run()
        return (clock() - start) / times * 1e6

    for run in (own, other):
        run()
    times = max(1, int(SECONDS * 1e6 / max(timed(own, 2), 1.0)))
    pairs = [(timed(own, times), timed(other, times)) for _ in range(ROUNDS)]
    mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"own_us": mine, "ort_us": theirs, "ratio": statistics.median(b / a for a, b in pairs)}


def matmul_cases(
    bits: int, threads: int, library: Path
) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    rng = np.random.default_rng(0)
    for k, n in MATMULS:
        weights = {
            "q": rng.integers(0, 256, (n, k // 32, 4 * bits), dtype=np.uint8),
            "s": rng.uniform(0.01, 0.1, (n, k // 32)).astype(np.float32),
        }
        shared = {"bits": bits, "K": k, "N": n}
        own_node = helper.make_node("InterleavedMatMul", ["x", "q", "s"], ["y"], domain="ai.dspark", block=32, **shared)
        tiles = {"q": interleave_codes(weights["q"]), "s": interleave_factors(weights["s"])}
        ort_node = helper.make_node(
            "MatMulNBits", ["x", "q", "s"], ["y"], domain="com.microsoft", block_size=32, accuracy_level=4, **shared
        )
        example = {"x": np.zeros((1, k), np.float32)}
        own = session_of(model_of(own_node, example, tiles), threads, library)
        other = session_of(model_of(ort_node, example, weights), threads, None)
        for rows in ROWS:
            if rows * n > 2**22:
                continue
            inputs = {"x": rng.standard_normal((rows, k), dtype=np.float32)}
            output = {"y": np.zeros((rows, n), np.float32)}
            yield f"int{bits} {k}x{n} M={rows}", runner(own, inputs, output), runner(other, inputs, output)


def attention_cases(threads: int, library: Path) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    rng = np.random.default_rng(1)
    common = {"scale": SIZE**-0.5}
    own_node = helper.make_node(
        "VerifyAttention",
        ["q", "k", "v", "k_pool", "v_pool", "past"],
        ["o", "k_out", "v_out"],
        domain="ai.dspark",
        **common,
    )
    ort_node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "k_pool", "v_pool", "last", "total"],
        ["o", "k_out", "v_out"],
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        **common,
    )
    for past, rows in [(past, rows) for past in PASTS for rows in QUERIES] + [(0, 512)]:

        def normal(*shape: int) -> Any:
            return rng.standard_normal(shape, dtype=np.float32)

        q, k, v = normal(1, HEADS, rows, SIZE), normal(1, KV_HEADS, rows, SIZE), normal(1, KV_HEADS, rows, SIZE)
        flat = {name: x.transpose(0, 2, 1, 3).reshape(1, rows, -1) for name, x in (("q", q), ("k", k), ("v", v))}
        pools = [{name: normal(1, KV_HEADS, POOL, SIZE) for name in ("k_pool", "v_pool")} for _ in range(2)]
        own_in = {"q": q, "k": k, "v": v, **pools[0], "past": np.array([past], np.int32)}
        last, total = np.array([past + rows - 1], np.int32), np.array(past + rows, np.int32)
        ort_in = {**flat, **pools[1], "last": last, "total": total}
        runs = []
        for node, inputs, result, used in ((own_node, own_in, q, library), (ort_node, ort_in, flat["q"], None)):
            values = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in inputs.items()}
            outputs = {"o": np.zeros_like(result), "k_out": values["k_pool"], "v_out": values["v_pool"]}
            runs.append(runner(session_of(model_of(node, inputs), threads, used), values, outputs))
        yield f"attention past={past} S={rows}", runs[0], runs[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    library = native.library_path() or native.build(Path(tempfile.gettempdir()) / "dsc-native-bench")
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    kind = "cpu" if arguments.threads == 1 else "wall"
    results = {}
    for cases in (
        matmul_cases(4, arguments.threads, library),
        matmul_cases(8, arguments.threads, library),
        attention_cases(arguments.threads, library),
    ):
        for name, own, other in cases:
            if arguments.only not in name:
                continue
            results[name] = found = compare(own, other, clock)
            print(
                f"{name:28} own {found['own_us']:9.0f} us  ort {found['ort_us']:9.0f} us  x{found['ratio']:.2f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps({"threads": arguments.threads, "time": kind, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
