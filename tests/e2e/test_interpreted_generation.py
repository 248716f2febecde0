"""`generate` with attention and verdict by the GPU kernels, in Triton's interpreter: equal to the CPU path.

Everything but the two ends is the product's own way on a device: the same judge, verifier and choice of kernel
variants; the graph around the attention is run by onnx's reference evaluator, and "device" memory is the host's.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is an extra of the compiler")
pytest.importorskip("torch", reason="the interpreter takes torch tensors")

import forward_graphs
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from toy_bundle import toy_info, write_bundle

from dsc.bundle_schema.model_info import KvLayer
from dsc.compiler.gpu_operators import bind_operator
from dsc.kernels.verify_attention import VERIFY_ATTENTION
from dsc.passes.pass_order import default_pipeline
from dsc.passes.pipeline import run_pipeline
from dsc.runtime.cached_model import CachedModel
from dsc.runtime.cuda_session import DeviceLogits
from dsc.runtime.device_verify import DeviceTail
from dsc.runtime.generate import SpeculativeModel
from dsc.runtime.load import load

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PROMPT = [5, 9, 17, 5, 9, 17, 5, 9]
SELF = {"proposer": "self", "window": 3, "fallback": False}
SAMPLINGS = [
    {},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 11},
]


class HostMemory:
    """A stream whose device is the host: copies happen at once, and nothing is ever waited for."""

    handle = 0

    def __init__(self):
        self._held = []

    def allocate(self, nbytes):
        self._held.append(np.zeros(nbytes + 64, np.uint8))
        return -(-self._held[-1].ctypes.data // 64) * 64

    def upload(self, address, array):
        ctypes.memmove(address, np.ascontiguousarray(array).ctypes.data, array.nbytes)

    def download(self, array, address):
        ctypes.memmove(array.ctypes.data, address, array.nbytes)


class KernelForward:
    """The exported graph of a model; its `VerifyAttention` nodes are the kernel's."""

    chunk = 64

    def __init__(self, proto, kernels, stream, zone, vocab_size):
        class VerifyAttention(OpRun):
            op_domain = "ai.dspark"

            def _run(self, *arrays, scale, window, softcap):
                tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
                inputs = dict(zip([role.name for role in VERIFY_ATTENTION.inputs], tensors, strict=False))
                attributes = {"scale": scale, "window": window, "softcap": softcap}
                found = bind_operator(kernels, VERIFY_ATTENTION, inputs, attributes).run()
                return tuple(found[role.name].numpy() for role in VERIFY_ATTENTION.outputs)

        self._run = ReferenceEvaluator(proto, new_ops=[VerifyAttention])
        self._stream, self._zone, self._vocab_size = stream, zone, vocab_size
        self._logits = stream.allocate(4 * vocab_size * self.chunk)
        self._ids = stream.allocate(8 * self.chunk)

    def forward(self, tokens, past, n_logits):
        n = len(tokens)
        ids = np.array([tokens], np.int64)
        given = {
            "input_ids": ids,
            "position_ids": past + np.arange(n)[None],
            "logit_rows": np.arange(n - n_logits, n),
            "past_lengths": np.array([past], np.int32),
            **self._zone.pools,
        }
        outputs = dict(zip(self._run.output_names, self._run.run(None, given), strict=True))
        for name, pool in self._zone.pools.items():
            pool[:] = outputs[name.replace("_pool.", "_pool_out.")]
        self._stream.upload(self._logits, outputs["logits"].astype(np.float32))
        self._stream.upload(self._ids, ids)
        return DeviceLogits(self._stream, self._logits, n_logits, self._vocab_size, self._ids, n)


def graph(precision=None):
    """A random decoder with heads of 64, as the exporter writes it or, with a precision, through the CPU's passes."""
    with patch.object(forward_graphs, "HEAD_DIM", 64):
        model = forward_graphs.forward_graph()
    if precision is not None:
        run_pipeline(model, default_pipeline("ort", precision))
    return ir.to_proto(model)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(the CPU path, the same bundle with its target on interpreted kernels, the kernels)."""
    from interpreted_kernels import InterpretedKernels

    layers = (KvLayer(n_kv_heads=forward_graphs.KV_HEADS, head_dim=64),) * forward_graphs.N_LAYERS
    info = toy_info(forward_graphs.VOCAB, 64, (), layers)
    path = tmp_path_factory.mktemp("interpreted") / "toy.dsmodel"
    write_bundle(path, graph("fp32"), info, draft=graph("int8"), draft_info=info, draft_kind="self")
    cpu, other = load(path), load(path)
    kernels, stream, target = InterpretedKernels(), HostMemory(), other.bundle.target
    forward = KernelForward(graph(), kernels, stream, target.zone, info.vocab_size)
    bundle = replace(
        other.bundle,
        target=CachedModel(forward, target.zone, target.max_length),
        tail=DeviceTail(kernels, stream, info.vocab_size, max_rows=33),
    )
    return cpu, SpeculativeModel(bundle), kernels


@pytest.mark.skipif(not INTERPRETED, reason="this is the other process")
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_kernels_generate_what_the_cpu_generates(models, sampling):
    cpu, interpreted, kernels = models
    for speculation in ("off", SELF):
        options = {"max_new_tokens": 8, "sampling": sampling, "speculation": speculation, "ignore_eos": True}
        wanted, found = cpu.generate(PROMPT, **options), interpreted.generate(PROMPT, **options)
        assert found.ids == wanted.ids
        assert found.stats.kernels == "dspark"
        assert (found.stats.proposed, found.stats.accepted) == (wanted.stats.proposed, wanted.stats.accepted)
        assert (found.stats.accepted > 0) == (speculation == SELF)
    assert {"verify_head_tiled_fp16_d64_16x128"} <= set(kernels.launched)


@pytest.mark.skipif(not INTERPRETED, reason="this is the other process")
def test_both_verdicts_and_the_cut_took_part(models):
    launched = set(models[2].launched)
    assert launched >= {"verify_row_stats_argmax", "verify_accept_greedy", "verify_row_stats_sums", "verify_row_cutoff"}


@pytest.mark.skipif(INTERPRETED, reason="this is the other process")
def test_generate_through_the_interpreter():
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
