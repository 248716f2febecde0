"""What one generation leaves to the next: nothing after `reset`, and no draws when no seed was named."""

import pytest
from scripted_text import DRAFT, NGRAM, PROMPT, SELF, TARGET
from toy_bundle import toy_bundle

from dsc.bundle_schema.dflash_config import CalibratedPolicy, DflashConfig, Proposer
from dsc.runtime import load

OTHER = [7, 7, 2, 9, 0, 1] * 5
TIMES = {"ms", "first_token_ms", "total_ms", "tokens_per_second"}
SAMPLED = {"temperature": 1.0}


def config(policy="fixed"):
    rows = {kind: Proposer() for kind in ("self", "ngram", "cache")}
    return DflashConfig(policy=policy, proposers=rows, calibrated=CalibratedPolicy(refresh_costs=False))


def facts(result):
    """Everything that a result says but for times."""
    record = {name: value for name, value in result.stats.to_dict().items() if name not in TIMES}
    for proposer in record["proposers"].values():
        del proposer["ms"]
    return result.ids, result.finish_reason, record


def use(model):
    """Leave something in every cache: prompts that displaced each other, known continuations, drafts cut short."""
    for prompt in (OTHER, PROMPT * 8, OTHER):
        model.generate(prompt, 30, reuse_cache=True)
        model.generate(prompt, 30, speculation={"proposer": "cache", "window": 8, "fallback": False})
    model.generate(PROMPT, 40, stop_tokens=[4, 5], speculation=SELF)
    model.generate(PROMPT, 20, SAMPLED, seed=1, speculation=NGRAM)
    with model.stream(OTHER, 30, speculation=SELF) as stream:
        next(stream)
        next(stream)


@pytest.mark.parametrize("policy", ["fixed", "rules", "calibrated", "batched"])
def test_after_a_reset_everything_is_as_after_loading(tmp_path, policy):
    path = toy_bundle(tmp_path / "toy.dsmodel", TARGET, DRAFT, draft_kind="self", max_length=96, config=config(policy))
    used, fresh = load(path, verify="never"), load(path, verify="never")
    use(used)
    used.reset()
    cached = {"proposer": "cache", "window": 4, "fallback": False}
    for speculation in ("auto", SELF, NGRAM, cached, "off"):
        for prompt in (OTHER, PROMPT, OTHER):
            options = {"speculation": speculation, "reuse_cache": True}
            assert facts(used.generate(prompt, 40, **options)) == facts(fresh.generate(prompt, 40, **options))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "toy.dsmodel"
    return load(toy_bundle(path, TARGET, DRAFT, draft_kind="self", max_length=96, config=config()), verify="never")


def test_runs_without_a_seed_draw_one_each(model):
    runs = [model.generate(PROMPT, 40, SAMPLED, speculation=SELF) for _ in range(5)]
    with model.engine(slots=3) as engine:
        tickets = [engine.submit(PROMPT, max_new_tokens=40, sampling=SAMPLED, speculation=SELF) for _ in range(5)]
        runs += [ticket.result() for ticket in tickets]
    assert len({run.stats.seed for run in runs}) == len({run.ids for run in runs}) == 10
    for run in runs:
        assert model.generate(PROMPT, 40, SAMPLED, seed=run.stats.seed, speculation="off").ids == run.ids


def test_in_an_engine_a_seed_fixes_the_output_and_another_changes_it(model):
    options = {"max_new_tokens": 40, "sampling": SAMPLED, "speculation": SELF}
    with model.engine(slots=4) as engine:
        tickets = [engine.submit(PROMPT, seed=seed, **options) for seed in (7, 7, 8, 7, 9, 10)]
        ids = [ticket.result().ids for ticket in tickets]
    assert ids[0] == ids[1] == ids[3]
    assert len(set(ids)) == 4
    assert ids[0] == model.generate(PROMPT, 40, SAMPLED, seed=7, speculation="off").ids
