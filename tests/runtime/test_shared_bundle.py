"""Several users of one loaded bundle, in turn and at once: weights are shared, and nothing else."""

from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from attention_lm import HEAD_DIM, N_KV_HEADS, attention_lm
from forward_graphs import VOCAB as FORWARD_VOCAB
from packed_bundle import packed_bundle
from scripted_lm import greedy_reference
from scripted_text import NGRAM, SELF, TARGET
from toy_bundle import toy_bundle, toy_info, write_bundle

from dsc.bundle_schema.dflash_config import DflashConfig, Proposer
from dsc.bundle_schema.errors import HostError
from dsc.bundle_schema.model_info import KvLayer
from dsc.kernels.native import find_library
from dsc.runtime import SpeculativeModel, load
from dsc.runtime.session import MOST_BINDINGS

PROMPTS = [[3, 1, 4], [8, 8], [0, 5, 5, 2, 9, 1], [12], [7, 2, 7, 2, 7]]


@pytest.mark.parametrize("speculation", ["off", SELF, NGRAM], ids=["off", "self", "ngram"])
def test_two_engines_and_a_stream_go_on_in_turn(tmp_path, speculation):
    """Their forwards alternate, each time over buffers that were bound once for other shapes."""
    config = DflashConfig(proposers={"self": Proposer(), "ngram": Proposer()})
    path = toy_bundle(tmp_path / "toy.dsmodel", TARGET, TARGET, draft_kind="self", max_length=128, config=config)
    model = load(path, verify="never")
    engines = [model.engine(slots=slots, background=False) for slots in (1, 3)]
    options = {"max_new_tokens": 60, "speculation": speculation}
    tickets = [[engine.submit(prompt, **options) for prompt in PROMPTS] for engine in engines]
    streamed = []
    for chunk in model.stream(PROMPTS[0][::-1], **options):
        streamed += chunk.ids
        for engine in engines:
            engine.step()
    for engine in engines:
        engine.run()
    assert streamed == greedy_reference(TARGET, PROMPTS[0][::-1], 60)
    for mine in tickets:
        for prompt, ticket in zip(PROMPTS, mine, strict=True):
            assert list(ticket.result().ids) == greedy_reference(TARGET, prompt, 60)


def test_two_engines_and_the_model_run_at_once(tmp_path):
    """On threads of their own, with the native kernels where they are."""
    kernels = "native" if find_library().path is not None else "ort"
    model = load(packed_bundle(tmp_path / "tiny.dsmodel"), kernels=kernels)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, FORWARD_VOCAB, size).tolist() for size in (3, 90, 17, 40)] + [[5, 6, 7, 8] * 6]
    options = {"max_new_tokens": 60, "speculation": {"proposer": "ngram", "window": 4, "fallback": False}}
    wanted = [model.generate(prompt, 60, speculation="off").ids for prompt in prompts]
    found = []

    def generate():
        found.extend(model.generate(prompt, **options).ids for prompt in prompts)

    thread = Thread(target=generate)
    with model.engine(slots=2) as one, model.engine(slots=4) as other:
        tickets = [[engine.submit(prompt, **options) for prompt in prompts] for engine in (one, other)]
        thread.start()
        assert [[ticket.result(60).ids for ticket in mine] for mine in tickets] == [wanted, wanted]
        thread.join()
    assert found == wanted


def test_sequences_of_an_engine_cross_the_sliding_window_alike(tmp_path):
    window, vocab = 8, 24
    info = toy_info(vocab, 256, kv_layers=(KvLayer(n_kv_heads=N_KV_HEADS, head_dim=HEAD_DIM, window=window),))
    graphs = [attention_lm(7, vocab, window) for _ in range(2)]
    path = write_bundle(tmp_path / "toy.dsmodel", graphs[0], info, draft=graphs[1], draft_info=info, draft_kind="self")
    model = load(path, verify="never")
    prompts = [[(5 * i + 3) % vocab for i in range(n)] for n in (1, window - 1, window, window + 1, 3 * window)]
    wanted = [model.generate(prompt, 40, speculation="off").ids for prompt in prompts]
    with model.engine(slots=3) as engine:
        tickets = [engine.submit(prompt, max_new_tokens=40, speculation=SELF) for prompt in prompts]
        for ticket, ids in zip(tickets, wanted, strict=True):
            assert ticket.result().ids == ids
            assert ticket.stats.accepted == ticket.stats.evaluated > 0
        more = [
            engine.submit([*prompt, *ids], max_new_tokens=20, speculation=SELF, reuse_cache=True)
            for prompt, ids in zip(prompts, wanted, strict=True)
        ]
        for prompt, ids, ticket in zip(prompts, wanted, more, strict=True):
            assert ticket.result().ids == model.generate([*prompt, *ids], 20, speculation="off").ids


def test_an_engine_on_a_device_is_refused_with_what_to_do(tmp_path):
    model = load(toy_bundle(tmp_path / "toy.dsmodel", TARGET), verify="never")
    elsewhere = SpeculativeModel(replace(model.bundle, arena=object()))
    with pytest.raises(HostError, match=r"engine: the CPU is required for now \(load with provider='cpu'\)"):
        elsewhere.engine()


def test_rows_of_any_number_keep_no_more_than_a_fixed_number_of_bindings(tmp_path):
    """Every new shape has a binding of its own; memory must not grow with the shapes that were seen."""
    model = load(packed_bundle(tmp_path / "tiny.dsmodel"), verify="never")
    session = model.bundle.target.session.over(model.bundle.target.zone, max_rows=60, chunk=64)
    wanted = {n: session.forward([7] * n, 0, 1).copy() for n in (1, 2, 60)}
    for n_rows in range(1, 61):
        for n_logits in range(1, n_rows + 1):
            session.forward([7] * n_rows, 0, n_logits)
            assert len(session._bindings) <= MOST_BINDINGS
    for n_rows, logits in wanted.items():
        np.testing.assert_array_equal(session.forward([7] * n_rows, 0, 1), logits)


@pytest.mark.slow
def test_memory_does_not_grow_over_many_requests(tmp_path):
    kernels = "native" if find_library().path is not None else "ort"
    model = load(packed_bundle(tmp_path / "tiny.dsmodel"), kernels=kernels)
    model.update_config({"cache.prefix_max_nbytes": 2**20})  # full at once: saved texts have a bound of their own
    rng = np.random.default_rng(0)

    def serve():
        with model.engine(slots=4) as engine:
            for _ in range(300):
                prompt = rng.integers(0, FORWARD_VOCAB, rng.integers(1, 150)).tolist()
                engine.submit(prompt, max_new_tokens=int(rng.integers(1, 50)), reuse_cache=bool(rng.integers(2)))
        return int(Path("/proc/self/statm").read_text().split()[1])

    _, before, _, after = (serve() for _ in range(4))
    assert after <= 1.01 * before
