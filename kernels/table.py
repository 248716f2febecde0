"""Every operator contract by name; modules are imported when a contract is asked for."""

from __future__ import annotations

from importlib import import_module

from dsc.bundle_schema.errors import KernelError
from dsc.kernels.contract import KernelContract

CONTRACTS: dict[str, str] = {
    "BlockMatMul": "dsc.kernels.block_matmul:BLOCK_MATMUL",
    "DenseMatMul": "dsc.kernels.dense_matmul:DENSE_MATMUL",
    "DenseMatMulSkipNorm": "dsc.kernels.matmul_skip_norm:DENSE_MATMUL_SKIP_NORM",
    "Experts": "dsc.kernels.experts:EXPERTS",
    "Int16Gather": "dsc.kernels.int16_gather:INT16_GATHER",
    "Int16MatMul": "dsc.kernels.int16_matmul:INT16_MATMUL",
    "Int16MatMulSkipNorm": "dsc.kernels.matmul_skip_norm:INT16_MATMUL_SKIP_NORM",
    "InterleavedGather": "dsc.kernels.interleaved_gather:INTERLEAVED_GATHER",
    "InterleavedMatMul": "dsc.kernels.interleaved_matmul:INTERLEAVED_MATMUL",
    "InterleavedMatMulSkipNorm": "dsc.kernels.matmul_skip_norm:INTERLEAVED_MATMUL_SKIP_NORM",
    "KvCommit": "dsc.kernels.kv_ops:KV_COMMIT",
    "KvRollback": "dsc.kernels.kv_ops:KV_ROLLBACK",
    "MarkovWalk": "dsc.kernels.markov_walk:MARKOV_WALK",
    "QkvAttention": "dsc.kernels.qkv_attention:QKV_ATTENTION",
    "SpeculativeVerify": "dsc.kernels.speculative_verify:SPECULATIVE_VERIFY",
    "SwiGlu": "dsc.kernels.swiglu:SWIGLU",
    "TreeVerify": "dsc.kernels.tree_verify:TREE_VERIFY",
    "VerifyAttention": "dsc.kernels.verify_attention:VERIFY_ATTENTION",
    "VerifyAttentionInt8": "dsc.kernels.verify_attention_int8:VERIFY_ATTENTION_INT8",
}
"""Operator of the `ai.dspark` domain -> ``module:NAME``."""


def load_contract(name: str) -> KernelContract:
    """The contract called `name`.

    Raises:
        KernelError: there is none; the message lists those that exist.
    """
    if name not in CONTRACTS:
        raise KernelError(name, "there is no such operator", f"known: {', '.join(sorted(CONTRACTS))}")
    module, _, attribute = CONTRACTS[name].partition(":")
    contract = getattr(import_module(module), attribute)
    assert isinstance(contract, KernelContract)
    return contract
