"""A trace tells each round, and signals and policies show in it without changing the output."""

import io
import json

import numpy as np
import pytest
from scripted_lm import greedy_reference
from toy_bundle import toy_bundle

from dsc.bundle_schema.dflash_config import CalibratedPolicy, CostCurve, DflashConfig, Proposer
from dsc.bundle_schema.errors import RequestError
from dsc.runtime import load

VOCAB = 13
RNG = np.random.default_rng(3)
TARGET = RNG.normal(size=(VOCAB, VOCAB)).astype(np.float32)
DRAFT = TARGET + 0.5 * RNG.normal(size=TARGET.shape).astype(np.float32)
PROMPT = [3, 1, 4, 1, 5]
CURVE = CostCurve(
    device="toy",
    verify_ms=tuple(10.0 + row for row in range(16)),
    draft_ms={"self": tuple(1.0 * k for k in range(1, 17))},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "toy.dsmodel"
    config = DflashConfig(
        costs=(CURVE,),
        proposers={"ngram": Proposer(), "self": Proposer(), "cache": Proposer(enabled=False)},
        calibrated=CalibratedPolicy(refresh_costs=False),
    )
    return load(
        toy_bundle(path, TARGET, DRAFT, draft_kind="self", max_length=256, config=config, history=False),
        verify="never",
    )


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("policy", ["fixed", "rules", "calibrated", "batched"])
def test_every_policy_gives_the_same_tokens_and_says_what_it_did(model, policy):
    model.update_config({"policy": policy})
    file = io.StringIO()
    result = model.generate(PROMPT, 120, trace=file)
    expected = greedy_reference(TARGET, PROMPT, 120, history=False)
    assert list(result.ids) == expected
    first, *rounds, last = lines(file.getvalue())
    assert (first["event"], first["schema_version"], first["policy"]) == ("request", "1.2", policy)
    assert first["prompt_ids"] == PROMPT
    assert [token for line in rounds for token in line["new_ids"]] == expected
    assert [line["round"] for line in rounds] == list(range(len(rounds)))
    assert sum(line["accepted"] for line in rounds) == result.stats.accepted > 0
    assert sum(len(line["draft_ids"]) for line in rounds) == result.stats.proposed
    for line in rounds:
        accepted, proposed = line["accepted"], len(line["draft_ids"])
        assert line["draft_ids"][:accepted] == line["new_ids"][:accepted]
        assert line["positions"] == [1] * accepted + [0] * (proposed > accepted)
        assert (line["proposer"] == "") == (proposed == 0)
        assert proposed or line["reason"] or line["round"] == 0
        assert proposed <= line["window"]
    signals = [line["signals"] for line in rounds if line["signals"]]
    assert all(0 <= seen["entropy"] <= 1.1 for seen in signals[1:])
    assert (last["event"], last["emitted"], last["finish_reason"]) == ("end", 120, "length")
    assert result.stats.policy == policy


def test_the_lock_of_the_rules_shows_in_the_trace(tmp_path):
    config = DflashConfig(policy="rules", proposers={"self": Proposer()})
    path = toy_bundle(tmp_path / "toy.dsmodel", TARGET, -TARGET, draft_kind="self", max_length=256, config=config)
    file = io.StringIO()
    load(path, verify="never").generate(PROMPT, 60, trace=file, speculation={"fallback": False})
    rounds = lines(file.getvalue())[1:-1]
    locked = [line for line in rounds if line["locked"]]
    assert not rounds[0]["locked"]
    assert locked
    assert all(line["window"] <= 2 for line in locked)
    assert all(line["failure"] > config.rules.failure_rate for line in locked if line["draft_ids"])


@pytest.mark.parametrize("policy", ["rules", "calibrated", "batched"])
def test_sampling_depends_on_the_seed_alone_under_every_policy(model, policy):
    sampling = {"temperature": 1.0, "top_p": 0.9}
    plain = model.generate(PROMPT, 60, sampling, seed=5, speculation="off")
    model.update_config({"policy": policy})
    assert model.generate(PROMPT, 60, sampling, seed=5).ids == plain.ids


def test_decisions_are_the_same_on_every_run(model):
    model.update_config({"policy": "calibrated"})

    def decisions() -> list[tuple]:
        file = io.StringIO()
        model.generate(PROMPT, 120, trace=file)
        return [(line["proposer"], line["draft_ids"], line["reason"]) for line in lines(file.getvalue())[1:-1]]

    assert decisions() == decisions()


def test_calibrated_uses_every_proposer_that_pays(model):
    model.update_config({"policy": "calibrated"})
    stats = model.generate(PROMPT, 200).stats
    assert stats.speculation == "self+ngram"
    assert stats.proposers["self"].rounds > 0
    assert stats.proposers["ngram"].rounds > 0  # without history the toy repeats itself


def test_refreshed_costs_do_not_change_the_output(model):
    model.update_config({"policy": "calibrated", "calibrated.refresh_costs": True})
    try:
        assert list(model.generate(PROMPT, 120).ids) == greedy_reference(TARGET, PROMPT, 120, history=False)
    finally:
        model.update_config({"calibrated.refresh_costs": False})


def test_a_path_is_added_to_and_a_run_without_speculation_is_traced_too(model, tmp_path):
    path = tmp_path / "trace.jsonl"
    model.generate(PROMPT, 10, trace=path)
    model.generate(PROMPT, 10, trace=path, speculation="off")
    events = [line["event"] for line in lines(path.read_text())]
    assert events.count("request") == events.count("end") == 2


def test_a_bad_trace_is_named_before_anything_runs(model, tmp_path):
    with pytest.raises(RequestError, match="nowhere"):
        model.generate(PROMPT, 5, trace=tmp_path / "nowhere" / "trace.jsonl")
    with pytest.raises(RequestError, match="a path or a text file"):
        model.generate(PROMPT, 5, trace=7)
    assert len(model.generate(PROMPT, 5).ids) == 5
