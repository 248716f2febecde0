"""Odd-shaped cases of every contract, for every implementation of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from dsc.kernels.attention_table import HEAD_SIZES
from dsc.kernels.contract import KernelContract
from dsc.kernels.speculative_verify import input_names
from dsc.kernels.table import CONTRACTS, load_contract

DTYPES = {
    "body": ("float32",),
    "native": ("float32",),
    "interpreted": ("float32", "float16"),  # the interpreter computes bfloat16 wrongly
    "gpu": ("float16", "bfloat16"),
}
ALL = ("body", "native", "interpreted", "gpu")
DEVICE = ("interpreted", "gpu")
# Input -> relative change that does as much as float32 sums and exponentials may: several times their rounding.
_ROUNDING = {"uniforms": 5e-6, "temperature": 1e-6, "top_p": 5e-6, "min_p": 5e-6}
_MOST_SEEDS = 1000


def is_decided(contract: KernelContract, inputs: dict[str, Any], attributes: dict[str, Any]) -> bool:
    """Whether no draw or filter lies so near a border that a rounding of float32 would change an integer result."""
    drawn = [name for name in _ROUNDING if name in inputs]
    wanted = contract.results(inputs, attributes) if drawn else {}
    integers = [name for name, value in wanted.items() if value.dtype.kind in "iub"]
    for name, sign in product(drawn, (-1, 1)):
        given = inputs[name]
        moved = (given * (1 + sign * _ROUNDING[name])).astype(given.dtype)
        if name == "top_p":
            moved[given == 1] = 1  # it is off, not near a border
        found = contract.results({**inputs, name: moved}, attributes)
        if any((found[output] != wanted[output]).any() for output in integers):
            return False
    return True


@dataclass(frozen=True)
class Case:
    """One case; `inputs` are those kept of what the contract's maker gives, None keeps all; `edit` changes them."""

    label: str
    contract: str
    axes: dict[str, int]
    attributes: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] | None = None
    seed: int = 1
    kinds: tuple[str, ...] = ALL
    edit: Callable[[dict[str, Any]], None] = lambda made: None

    def __str__(self) -> str:
        return f"{self.contract}: {self.label}"

    def dtypes(self, kind: str) -> tuple[str, ...]:
        """The types to try: one where nothing is of the type under test, 16 bits where the kernels move bits."""
        roles = load_contract(self.contract).inputs
        if all(role.kind != "float" for role in roles if self.inputs is None or role.name in self.inputs):
            return DTYPES[kind][:1]
        # An int8 pool's rows are never float32, and kernels of the pool move bits of 8 or 16.
        narrow = kind == "interpreted" and self.contract in ("KvCommit", "KvRollback", "VerifyAttentionInt8")
        moved = ("int8",) if kind in DEVICE and self.contract in ("KvCommit", "KvRollback") else ()
        return (*(("float16",) if narrow else DTYPES[kind]), *moved)

    def make(self) -> dict[str, Any]:
        """Inputs of the first seed whose integer results no rounding would change."""
        contract = load_contract(self.contract)
        made = (self._made(seed) for seed in range(self.seed, self.seed + _MOST_SEEDS))
        return next(inputs for inputs in made if is_decided(contract, inputs, self.attributes))

    def _made(self, seed: int) -> dict[str, Any]:
        made = load_contract(self.contract).make_inputs(self.axes, seed)
        self.edit(made)
        return made if self.inputs is None else {name: made[name] for name in self.inputs if name in made}


_PLAIN = ("q", "k", "v", "k_pool", "v_pool", "past_lengths", "k_scales", "v_scales")


def _attention(name: str) -> Iterator[Case]:
    """Rows 1 to 32, packed and not, cut and whole, in every head size."""

    def case(label, shape, attributes, *options, kinds=DEVICE):
        axes = dict(zip(("B", "Hq", "Hkv", "S", "D", "M"), shape, strict=True))
        return Case(label, name, axes, {"scale": 0.3} | attributes, (*_PLAIN, *options), kinds=kinds)

    everywhere = ALL if name == "VerifyAttention" else DEVICE
    yield case("ragged tree with sinks", (3, 6, 2, 5, 64, 37), {}, "sinks", "tree_mask", kinds=everywhere)
    yield case("one row, 80 wide", (3, 3, 1, 1, 80, 19), {"window": 4}, kinds=everywhere)
    yield case("7 rows in two tiles, 64 wide", (1, 40, 2, 7, 64, 150), {"scale": 0.2}, kinds=everywhere)
    yield case("a tile of 64 rows, 96 wide", (2, 10, 2, 5, 96, 140), {}, "tree_mask", kinds=everywhere)
    yield case("32 rows, 128 wide", (1, 4, 1, 32, 128, 131), {"softcap": 3.0, "scale": 0.4}, kinds=everywhere)
    yield case("256 wide, softcap, sinks", (2, 2, 1, 3, 256, 90), {"softcap": 2.5, "scale": 0.1}, "sinks")
    yield case("cut into parts", (1, 6, 1, 3, 64, 1700), {}, "sinks", kinds=everywhere)
    yield case("cut into parts, window, tree", (1, 3, 1, 5, 80, 1600), {"window": 900}, "tree_mask", kinds=everywhere)
    for size in HEAD_SIZES:
        for groups, rows in ((2, 3), (5, 8), (3, 32)):  # tiles of 16, 64 and 128 rows
            for cap in (0.0, 2.5):
                label = f"{size} wide, {groups * rows} packed rows, softcap {cap}"
                shape, attributes = (2, 2 * groups, 2, rows, size, 1700), {"softcap": cap, "scale": 0.1}
                yield case(label, shape, attributes, "sinks", kinds=("gpu",))


def _ties(made: dict[str, Any]) -> None:
    """Equal logits, and drafts that the target takes but for one."""
    made["logits"] = np.round(made["logits"])
    made["draft_ids"] = made["logits"].argmax(-1)[:, :-1].copy()
    made["draft_ids"][0, -1] += 1


def _edges(made: dict[str, Any]) -> None:
    """A draft just outside the vocabulary, and a uniform that was rounded to 1."""
    made["draft_ids"][0, 1] = made["logits"].shape[-1]
    made["uniforms"][1, -1] = 1.0


def _verdicts() -> Iterator[Case]:
    """Every mode with and without filters; the search of a cut costs the interpreter seconds, so it does a few."""
    wide = {"B": 2, "K": 4, "R": 5, "V": 9001, "W": 9001}
    narrow = {"B": 3, "K": 2, "R": 3, "V": 37, "W": 37}
    modes = [
        ("greedy", False),
        ("deterministic", False),
        *((m, s) for m in ("rejection", "block") for s in (False, True)),
    ]
    for mode, sparse in modes:
        names, edit = input_names(mode, sparse), _ties if mode == "greedy" else _edges
        bare = tuple(name for name in names if name not in ("top_k", "top_p", "min_p"))
        width = {"W": 6} if sparse else {}
        form = f"{mode}{', sparse q' if sparse else ''}"
        searched = ALL if mode == "greedy" or (mode == "block") == sparse else ("body", "gpu")
        for label, axes in (("wide", wide | width), ("narrow", narrow | width)):
            kinds = searched if label == "narrow" or mode == "greedy" else ("body", "gpu")
            yield Case(f"{form}, {label}", "SpeculativeVerify", axes, {"mode": mode}, names, kinds=kinds, edit=edit)
        if mode != "greedy":
            label = f"{form}, no filters"
            yield Case(label, "SpeculativeVerify", wide | width, {"mode": mode}, bare, kinds=DEVICE, edit=edit)
    lone = {"B": 2, "K": 1, "R": 2, "V": 2777, "W": 2777}
    names = input_names("deterministic")
    yield Case("filters over several tiles", "SpeculativeVerify", lone, {"mode": "deterministic"}, names)


def _trees() -> Iterator[Case]:
    bare = ("logits", "tokens", "parents", "lengths", "uniforms", "temperature")
    axes = {"B": 2, "N": 4, "R": 5, "V": 61}
    wide = {"B": 2, "N": 7, "R": 8, "V": 4999}
    for seed in (0, 1, 2):
        yield Case(f"greedy {seed}", "TreeVerify", wide, {"mode": "greedy"}, bare[:4], seed)
        yield Case(f"sampled {seed}", "TreeVerify", wide, {}, bare, seed)
        kinds = ALL if seed == 0 else ("gpu",)  # the search of a cut costs the interpreter seconds
        yield Case(f"filters {seed}", "TreeVerify", axes, {}, None, seed, kinds=kinds)


def _pools() -> Iterator[Case]:
    axes = {"B": 3, "Hkv": 2, "M": 23, "D": 64, "P": 4}
    for size in (64, 80, 96, 128, 256):
        yield Case(f"{size} wide", "KvCommit", axes | {"D": size})
    yield Case("the longest path", "KvCommit", axes | {"P": 23, "B": 1, "M": 40})
    yield Case("one row", "KvCommit", axes | {"P": 1})
    for erase in (0, 1):
        for entries in (1, 5) if erase else (1, 300):
            shape = {"B": 3, "Hkv": 2, "M": 37, "D": 80, "E": entries}
            yield Case(f"{entries} entries, erase {erase}", "KvRollback", shape, {"erase": erase})
    for size in HEAD_SIZES:
        shape = {"B": 3, "Hkv": 2, "M": 37, "D": size, "E": 5}
        yield Case(f"{size} wide, erased", "KvRollback", shape, {"erase": 1}, kinds=("gpu",))
    lengths = ("lengths", "journal")
    yield Case("lengths only", "KvRollback", {"B": 4, "Hkv": 1, "M": 9, "D": 64, "E": 7}, {}, lengths)


def _walks() -> Iterator[Case]:
    for shape in ({"B": 3, "n": 7, "k": 5}, {"B": 1, "n": 1, "k": 1}, {"B": 2, "n": 15, "k": 32}):
        for temperature in (0.0, 0.7, 1.3):
            yield Case(f"{shape} at {temperature}", "MarkovWalk", shape, {"temperature": temperature})


def _cpu_only() -> Iterator[Case]:
    multiply = {"bits": 4, "K": 160, "N": 37, "block": 32}
    yield Case("4 bits", "BlockMatMul", {"M": 3, "G": 5, "K": 160, "N": 37, "P": 16}, multiply)
    axes = {"M": 3, "G": 5, "K": 160, "N": 48, "T": 3}
    for bits in (4, 8):
        yield Case(f"{bits} bits", "InterleavedMatMul", axes | {"Q": bits}, multiply | {"bits": bits, "N": 48})
        name, attributes = "InterleavedMatMulSkipNorm", multiply | {"bits": bits, "N": 48, "epsilon": 1e-3}
        yield Case(f"{bits} bits", name, axes | {"Q": bits}, attributes)
        yield Case(
            f"{bits} bits, no minima", name, axes | {"Q": bits}, attributes, ("x", "qweight", "scales", "skip", "gain")
        )
        gather = {"bits": bits, "K": 96, "N": 32, "block": 32}
        yield Case(f"{bits} bits", "InterleavedGather", {"S": 5, "G": 3, "K": 96, "T": 2, "Q": bits}, gather)
    yield Case("odd shape", "DenseMatMulSkipNorm", {"M": 3, "K": 53, "N": 37}, {"epsilon": 1e-3})
    halves = {"M": 3, "K": 96, "G": 3, "E": 12, "N": 38, "P": 19}
    yield Case("96 wide", "Int16MatMul", halves, {"K": 96, "N": 38})
    yield Case("96 wide", "Int16MatMulSkipNorm", halves, {"K": 96, "N": 38, "epsilon": 1e-3})
    yield Case("96 wide", "Int16Gather", {"S": 5, "K": 96, "G": 3, "E": 12, "P": 4}, {"K": 96, "N": 8})
    yield Case("odd width", "SwiGlu", {"M": 3, "F": 37, "W": 74})
    gate = {"activation": "silu", "gated": 1, "interleaved": 0, "transposed": 0, "alpha": 1.7, "limit": 1.5}
    yield Case("its example", "Experts", dict(load_contract("Experts").example), gate)
    heads = {"heads": 6, "kv_heads": 2, "scale": 0.2, "window": 40, "softcap": 3.0}
    yield Case("7 rows", "QkvAttention", {"B": 2, "Hq": 6, "Hkv": 2, "S": 7, "D": 24, "M": 65, "R": 12}, heads)


_CHOSEN = (
    *_attention("VerifyAttention"), *_attention("VerifyAttentionInt8"), *_verdicts(), *_trees(), *_pools(), *_walks(),
    *_cpu_only(),
)  # fmt: skip
_OTHERS = sorted(set(CONTRACTS) - {case.contract for case in _CHOSEN})
CASES = (*_CHOSEN, *(Case("its example", name, dict(load_contract(name).example)) for name in _OTHERS))
