"""Real attention over the arena: windows, chunks, stale rows, copied pools."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from attention_lm import HEAD_DIM, N_KV_HEADS, attention_lm
from scripted_lm import greedy_reference, scripted_lm
from toy_bundle import toy_info, write_bundle

from dsc.bundle_schema.model_info import KvLayer
from dsc.runtime import load
from dsc.runtime.placer import PREFILL_CHUNK
from dsc.runtime.proposers import NgramProposer, Proposer

VOCAB = 24
WINDOW = 8
SPECULATION = [
    {"proposer": proposer, "window": window, "fallback": False}
    for proposer in ("ngram", "self")
    for window in (1, 4, 8)
]


def without_cache(model, prompt: list[int], n_new: int) -> list[int]:
    """Greedy decoding that reads everything again for each token."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    tokens = list(prompt)
    for _ in range(n_new):
        pool = np.full((1, N_KV_HEADS, len(tokens), HEAD_DIM), np.nan, np.float32)
        feeds = {
            "input_ids": np.array([tokens]),
            "logit_rows": np.array([len(tokens) - 1]),
            "past_lengths": np.zeros(1, np.int32),
            "k_pool.0": pool,
            "v_pool.0": pool,
        }
        tokens.append(int(session.run(["logits"], feeds)[0][0, 0].argmax()))
    return tokens[len(prompt) :]


def bundle(path: Path, window: int | None, max_length: int = 256) -> Path:
    layer = KvLayer(n_kv_heads=N_KV_HEADS, head_dim=HEAD_DIM, window=window)
    info = toy_info(VOCAB, max_length, kv_layers=(layer,))
    graph = attention_lm(7, VOCAB, window or -1)
    draft = attention_lm(7, VOCAB, window or -1)
    return write_bundle(path, graph, info, draft=draft, draft_info=info, draft_kind="self")


@pytest.mark.parametrize("window", [None, WINDOW])
def test_speculation_goes_on_across_the_sliding_window(tmp_path, window):
    model = load(bundle(tmp_path / "toy.dsmodel", window), verify="never")
    for n_prompt in (1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW):
        prompt = [(5 * i + 3) % VOCAB for i in range(n_prompt)]
        expected = without_cache(attention_lm(7, VOCAB, window or -1), prompt, 40)
        assert list(model.generate(prompt, 40, speculation="off").ids) == expected
        for speculation in SPECULATION:
            result = model.generate(prompt, 40, speculation=speculation)
            assert list(result.ids) == expected, (n_prompt, speculation)
            if speculation["proposer"] == "self":
                assert result.stats.accepted == result.stats.evaluated > 0
    model.bundle.arena.check_guards()


@pytest.mark.parametrize("n_prompt", [PREFILL_CHUNK, PREFILL_CHUNK + 1, 2 * PREFILL_CHUNK + 70])
def test_a_long_prompt_is_read_in_chunks(tmp_path, n_prompt):
    model = load(bundle(tmp_path / "toy.dsmodel", None, max_length=1200), verify="never")
    prompt = [(7 * i + i // 5) % VOCAB for i in range(n_prompt)]
    expected = without_cache(attention_lm(7, VOCAB), prompt, 6)
    for speculation in ("off", {"proposer": "self", "window": 3, "fallback": False}):
        assert list(model.generate(prompt, 6, speculation=speculation).ids) == expected


def test_a_graph_that_copies_its_pools_gives_the_same_output(tmp_path):
    table = np.random.default_rng(3).normal(size=(VOCAB, VOCAB)).astype(np.float32)
    graph = scripted_lm(table)
    for node in graph.graph.node:
        if node.output[0] in ("k_pool_out.0", "v_pool_out.0"):
            node.output[0] += ".scattered"
    for role in "kv":
        graph.graph.node.add(
            op_type="Sub", input=[f"{role}_pool_out.0.scattered", "no_change"], output=[f"{role}_pool_out.0"]
        )
    graph.graph.initializer.add(name="no_change", data_type=1, float_data=[0.0])
    path = write_bundle(tmp_path / "toy.dsmodel", graph, toy_info(VOCAB))
    model = load(path, verify="never")
    for speculation in ("off", {"window": 4, "fallback": False}):
        assert list(model.generate([1, 2], 50, speculation=speculation).ids) == greedy_reference(table, [1, 2], 50)


def test_rows_past_the_length_are_never_read(tmp_path):
    model = load(bundle(tmp_path / "toy.dsmodel", None), verify="never")
    expected = model.generate([1, 2, 3], 30).ids
    for zone in (model.bundle.target.zone, model.bundle.draft.zone):
        for pool in zone.pools.values():
            pool[:] = np.nan
    model.reset()
    for speculation in ("off", *SPECULATION):
        assert model.generate([1, 2, 3], 30, speculation=speculation).ids == expected


@pytest.mark.slow
def test_memory_does_not_grow_over_many_generations(tmp_path):
    model = load(bundle(tmp_path / "toy.dsmodel", None), verify="never")
    rng = np.random.default_rng(0)

    def generate(times: int) -> int:
        for _ in range(times):
            prompt = rng.integers(0, VOCAB, rng.integers(1, 200)).tolist()
            model.generate(prompt, int(rng.integers(1, 50)))
        return int(Path("/proc/self/statm").read_text().split()[1])

    before = generate(100)
    after = generate(500)
    assert after <= 1.01 * before


def test_the_proposers_are_what_the_loop_asks_for():
    proposer: Proposer = NgramProposer()
    assert proposer.look([1]) is None
    assert proposer.lag([1, 2, 3]) == 0
