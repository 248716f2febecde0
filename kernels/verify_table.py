"""The declared configurations of the verdict, pool and lattice kernels; the same on every architecture.

They are bound by memory or latency and use no matrix units, so there is nothing to tune per architecture.
"""

from __future__ import annotations

from dsc.kernels.kernel_variant import KernelVariant
from dsc.kernels.launch_record import GridFactor

MAX_VOCAB = 262_144
MAX_STEPS = 31
MAX_PARTS = 32
MAX_SPARSE = 64
PROPOSALS = {"point_mass": 0, "dense": 1, "sparse": 2}
# Tokens of a tile of the draw; the scan of a sparse proposal's support needs registers of its own.
_DRAW_TILE = {"point_mass": 4096, "dense": 4096, "sparse": 2048}

_ROWS = GridFactor(axis="batch"), GridFactor(axis="rows")
_BATCH = ((GridFactor(axis="batch"),), (), ())
_VOCAB_LIMIT = {"vocab": MAX_VOCAB, "steps": MAX_STEPS}


def _integers(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, "i32") for name in names)


def stats_variant(*, sums: bool) -> KernelVariant:
    """Row statistics, for greedy (maximum and token) or for sampling without truncation (and the sum)."""
    pointers = {"logits_ptr": "*fp32", "temperature_ptr": "*fp32", "best_ptr": "*fp32"}
    pointers |= {"token_ptr": "*i32", "sum_ptr": "*fp32"}
    return KernelVariant(
        kernel="dspark_speculative_verify",
        name=f"verify_row_stats_{'sums' if sums else 'argmax'}",
        module="verify_greedy_triton",
        function="row_stats",
        signature=(*pointers.items(), *_integers("vocab", "rows")),
        constants={"BLOCK_V": 2048, "SUMS": sums},
        divisible_by_16=("logits_ptr",),
        grid=(_ROWS, (GridFactor(axis="parts"),), ()),
        equals={"stage": "stats", "sums": int(sums)},
        at_most={"vocab": MAX_VOCAB, "parts": MAX_PARTS},
        num_warps=8,
        num_stages=3,
    )


def greedy_variant() -> KernelVariant:
    """The greedy verdict."""
    pointers = {"best_ptr": "*fp32", "token_ptr": "*i32", "drafts_ptr": "*i64", "lengths_ptr": "*i32"}
    pointers |= {"accepted_ptr": "*i32", "next_ptr": "*i64", "cause_ptr": "*i32"}
    return KernelVariant(
        kernel="dspark_speculative_verify",
        name="verify_accept_greedy",
        module="verify_greedy_triton",
        function="accept_greedy",
        signature=(*pointers.items(), *_integers("steps", "parts", "vocab")),
        constants={"BLOCK_S": MAX_STEPS + 1, "BLOCK_P": MAX_PARTS},
        divisible_by_16=(),
        grid=_BATCH,
        equals={"stage": "accept", "mode": "greedy"},
        at_most={**_VOCAB_LIMIT, "parts": MAX_PARTS},
        num_warps=4,
        num_stages=1,
    )


def cutoff_variant() -> KernelVariant:
    """Statistics of truncated rows."""
    pointers = {"logits_ptr": "*fp32", "temperature_ptr": "*fp32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32"}
    pointers |= {"min_p_ptr": "*fp32", "best_ptr": "*fp32", "sum_ptr": "*fp32", "cut_ptr": "*fp32"}
    return KernelVariant(
        kernel="dspark_speculative_verify",
        name="verify_row_cutoff",
        module="row_cutoff_triton",
        function="row_cutoff",
        signature=(*pointers.items(), *_integers("vocab", "rows")),
        constants={"BLOCK_V": 1024},
        divisible_by_16=("logits_ptr",),
        grid=(_ROWS, (), ()),
        equals={"stage": "cutoff"},
        at_most={"vocab": MAX_VOCAB},
        num_warps=8,
        num_stages=2,
    )


def sampled_variant(proposal: str, *, truncated: bool, block_rule: bool = False) -> KernelVariant:
    """The sampled verdict for one kind of proposal and rule."""
    pointers = {"logits_ptr": "*fp32", "drafts_ptr": "*i64", "lengths_ptr": "*i32", "q_ptr": "*fp32"}
    pointers |= {"q_ids_ptr": "*i32", "uniforms_ptr": "*fp32", "temperature_ptr": "*fp32", "best_ptr": "*fp32"}
    pointers |= {"sum_ptr": "*fp32", "cut_ptr": "*fp32", "accepted_ptr": "*i32", "next_ptr": "*i64"}
    pointers |= {"cause_ptr": "*i32"}
    rule = "block" if block_rule else "token"
    return KernelVariant(
        kernel="dspark_speculative_verify",
        name=f"verify_accept_{proposal}_{rule}{'_cut' if truncated else ''}",
        module="verify_sampled_triton",
        function="accept_sampled",
        signature=(*pointers.items(), *_integers("steps", "parts", "vocab", "width")),
        constants={
            "BLOCK_V": _DRAW_TILE[proposal],
            "TILES": MAX_VOCAB // _DRAW_TILE[proposal],
            "BLOCK_P": MAX_PARTS,
            "MODE": PROPOSALS[proposal],
            "TRUNCATED": truncated,
            "BLOCK_RULE": block_rule,
        },
        divisible_by_16=("logits_ptr",),
        grid=_BATCH,
        equals={
            "stage": "accept",
            "mode": "sampled",
            "proposal": proposal,
            "truncated": int(truncated),
            "rule": rule,
        },
        at_most={**_VOCAB_LIMIT, "parts": MAX_PARTS, "width": MAX_SPARSE},
        num_warps=8,
        num_stages=1,
        max_registers=128,
    )


def tree_variant(*, greedy: bool, truncated: bool) -> KernelVariant:
    """The verdict over a tree of point-mass drafts."""
    pointers = {"logits_ptr": "*fp32", "tokens_ptr": "*i32", "parents_ptr": "*i32", "lengths_ptr": "*i32"}
    pointers |= {"uniforms_ptr": "*fp32", "temperature_ptr": "*fp32", "best_ptr": "*fp32", "token_ptr": "*i32"}
    pointers |= {"sum_ptr": "*fp32", "cut_ptr": "*fp32", "path_ptr": "*i32", "accepted_ptr": "*i32"}
    pointers |= {"next_ptr": "*i64"}
    tile = _DRAW_TILE["sparse"]
    mode = "greedy" if greedy else "sampled"
    return KernelVariant(
        kernel="dspark_speculative_verify",
        name=f"verify_accept_tree_{mode}{'_cut' if truncated else ''}",
        module="verify_tree_triton",
        function="accept_tree",
        signature=(*pointers.items(), *_integers("nodes", "parts", "vocab")),
        constants={
            "BLOCK_V": tile,
            "TILES": MAX_VOCAB // tile,
            "BLOCK_P": MAX_PARTS,
            "BLOCK_N": MAX_STEPS + 1,
            "GREEDY": greedy,
            "TRUNCATED": truncated,
        },
        divisible_by_16=("logits_ptr",),
        grid=_BATCH,
        equals={"stage": "accept_tree", "mode": mode, "truncated": int(truncated)},
        at_most={**_VOCAB_LIMIT, "parts": MAX_PARTS},
        num_warps=8,
        num_stages=1,
    )


def verify_variants() -> tuple[KernelVariant, ...]:
    """Every kernel of the verdict. The block rule equals the token rule for a point mass, so that is one."""
    rules = [(proposal, rule) for proposal in PROPOSALS for rule in (False, True)]
    rules.remove(("point_mass", True))
    sampled = (
        sampled_variant(proposal, truncated=cut, block_rule=rule) for proposal, rule in rules for cut in (False, True)
    )
    trees = (
        tree_variant(greedy=greedy, truncated=cut) for greedy, cut in ((True, False), (False, False), (False, True))
    )
    stats = (stats_variant(sums=False), stats_variant(sums=True), cutoff_variant())
    return (*stats, greedy_variant(), *sampled, *trees)


def logits_read(batch: int, steps: int, vocab: int, mode: str, proposal: str = "point_mass") -> int:
    """The most logits that the verdict's two launches load where no filter truncates.

    Greedy, each once. Sampled, each once for its row's sum, then one row of each sequence for the masses of its tiles
    and one tile for the token, and each draft's own; the block rule sums the residual of each draft's next row besides.
    (A residual that rounding leaves empty costs its row once more.)

    Args:
        batch: sequences.
        steps: drafts of each.
        vocab: tokens of a row.
        mode: of `SpeculativeVerify`.
        proposal: one of `PROPOSALS`.
    """
    rows = batch * (steps + 1) * vocab
    if mode == "greedy":
        return rows
    again = 1 + (max(steps - 1, 0) if mode == "block" else 0)
    return rows + batch * (again * vocab + min(_DRAW_TILE[proposal], vocab) + steps)


def pool_variants(head_size: int, dtype: str) -> tuple[KernelVariant, ...]:
    """Commit, journal replay and erasure over pools of one head size; dtype may be ``int8``.

    They move bits, so element types of one size share a variant.
    """
    element = "int8" if dtype == "int8" else "int16"
    padded = 1 << (head_size - 1).bit_length()
    constants: dict[str, int | float | bool | str] = {
        "HEAD_SIZE": head_size,
        "BLOCK_D": padded,
        "BLOCK_S": 32,
        "ELEMENT": element,
    }
    pools = GridFactor(axis="pools")
    heads = (GridFactor(axis="kv_heads"),)
    commit = {"pools_ptr": "*i64", "past_ptr": "*i32", "path_ptr": "*i32", "count_ptr": "*i32"}
    fits: dict[str, int | str] = {"head_size": head_size, "element_bits": 8 if dtype == "int8" else 16}
    return (
        KernelVariant(
            kernel="dspark_kv_commit",
            name=f"kv_commit_{element}_d{head_size}",
            module="kv_ops_triton",
            function="kv_commit",
            signature=(*commit.items(), *_integers("pool_rows", "heads", "steps")),
            constants=constants,
            divisible_by_16=(),
            grid=((pools,), (GridFactor(axis="batch"),), heads),
            equals=fits,
            at_most={"steps": 32},
            num_warps=8,  # with 4, padded head sizes spill on sm_90
            num_stages=1,
        ),
        KernelVariant(
            kernel="dspark_kv_rollback",
            name="kv_rollback",
            module="kv_ops_triton",
            function="kv_rollback",
            signature=(("journal_ptr", "*i32"), ("lengths_ptr", "*i32"), ("entries", "i32")),
            constants={"BLOCK": 128},
            divisible_by_16=(),
            grid=((GridFactor(axis="entries", per=128),), (), ()),
            equals={"stage": "replay"},
            num_stages=1,
        ),
        KernelVariant(
            kernel="dspark_kv_rollback",
            name=f"kv_erase_{element}_d{head_size}",
            module="kv_ops_triton",
            function="kv_erase",
            signature=(("pools_ptr", "*i64"), ("journal_ptr", "*i32"), *_integers("pool_rows", "heads")),
            constants=constants,
            divisible_by_16=(),
            grid=((pools,), (GridFactor(axis="entries"),), heads),
            equals={"stage": "erase", **fits},
            num_stages=1,
        ),
    )


def walk_variants() -> tuple[KernelVariant, ...]:
    """The lattice walk, greedy and sampled."""
    pointers = {"ids_ptr": "*i64", "scores_ptr": "*fp32", "uniforms_ptr": "*fp32", "path_ptr": "*i64"}
    pointers |= {"q_ptr": "*fp32"}
    return tuple(
        KernelVariant(
            kernel="dspark_markov_walk",
            name=f"markov_walk_{'sampled' if sampled else 'greedy'}",
            module="markov_walk_triton",
            function="markov_walk",
            signature=(*pointers.items(), *_integers("n", "k"), ("inverse_temperature", "fp32")),
            constants={"BLOCK_K": 32, "SAMPLED": sampled},
            divisible_by_16=(),
            grid=_BATCH,
            equals={"sampled": int(sampled)},
            at_most={"k": 32},
            num_warps=1,
            num_stages=1,
        )
        for sampled in (False, True)
    )
