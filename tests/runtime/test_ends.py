"""Where an output ends is the target's to say, whoever drafts: alone and beside others, greedy and sampled."""

import io
import json
from contextlib import contextmanager

import numpy as np
import pytest
from scripted_lm import greedy_reference
from scripted_text import NGRAM, SELF, TARGET, VOCAB, letters, spelled
from toy_bundle import toy_bundle

from dsc.bundle_schema.dflash_config import DflashConfig, Proposer
from dsc.runtime import load

LONG = [3, 1, 4] * 7  # long enough to be saved for later prompts
AFTER = greedy_reference(TARGET, LONG, 40)
TEXT = spelled(AFTER)
END = min(set(range(VOCAB)) - set(TARGET.argmax(1).tolist()))  # greedy decoding never says it
WAYS = pytest.mark.parametrize("speculation", ["off", SELF, NGRAM], ids=["off", "self", "ngram"])
COMPANY = pytest.mark.parametrize("company", [False, True], ids=["alone", "engine"])
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 5}


@contextmanager
def speaker(model, company):
    """What generates: the model alone, or an engine whose other slot is at work."""
    if not company:
        yield model.generate
        return
    with model.engine(slots=2) as engine:

        def say(prompt, **options):
            engine.submit([5, 5, 5], max_new_tokens=30)
            return engine.submit(prompt, **options).result()

        yield say


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A draft that is the target, and lookups."""
    path = tmp_path_factory.mktemp("toy") / "toy.dsmodel"
    return load(toy_bundle(path, TARGET, TARGET, draft_kind="self", max_length=256, tokenizer=letters()))


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """A model with an end token, and a draft that proposes nothing else."""
    draft = np.full_like(TARGET, -1.0)
    draft[:, END] = 1.0
    rows = {"model": Proposer(), "ngram": Proposer(min_match=1), "cache": Proposer()}
    config = DflashConfig(proposers=rows)
    path = tmp_path_factory.mktemp("toy") / "toy.dsmodel"
    return load(toy_bundle(path, TARGET, draft, eos_ids=(END,), max_length=256, config=config), verify="never")


@COMPANY
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("proposer", ["model", "ngram", "cache"])
def test_an_end_that_was_only_drafted_ends_nothing(eager, proposer, window, sampling, company):
    prompt = [token for other in range(VOCAB) if other != END for token in (other, END)] + [0]

    def end_after_one_token(logits, history, drafts):
        if len(history) > len(prompt):
            logits[:] = -np.inf
            logits[:, END] = 0

    if proposer == "cache":  # what followed last time
        eager.generate(prompt, 5, sampling, processors=[end_after_one_token], ignore_eos=True, speculation="off")
    plain = eager.generate(prompt, 20, sampling, speculation="off") if proposer != "cache" else None
    trace = io.StringIO()
    speculation = {"proposer": proposer, "window": window, "fallback": False}
    with speaker(eager, company) as say:
        result = say(prompt, max_new_tokens=20, sampling=sampling, speculation=speculation, trace=trace)
    plain = plain or eager.generate(prompt, 20, sampling, speculation="off")
    rounds = [line for line in map(json.loads, trace.getvalue().splitlines()) if line["event"] == "round"]
    assert END in [line["draft_ids"][0] for line in rounds if line["draft_ids"]]
    assert (result.ids, result.finish_reason) == (plain.ids, plain.finish_reason)
    if not sampling:
        assert list(result.ids) == greedy_reference(TARGET, prompt, 20)
        assert result.finish_reason == "length"
        assert proposer != "model" or result.stats.accepted == 0 < result.stats.evaluated


@COMPANY
@WAYS
def test_a_stop_string_cuts_at_the_token_that_completes_it_and_the_caches_agree(model, speculation, company):
    options = {"speculation": speculation, "reuse_cache": True}
    with speaker(model, company) as say:
        for stop in (TEXT[at : at + 2] for at in range(1, 30, 4)):
            n = TEXT.index(stop) + 2
            result = say(LONG, max_new_tokens=40, stop=stop, **options)
            assert list(result.ids) == AFTER[:n]
            assert (result.text, result.finish_reason) == (TEXT[: n - 2], "stop")
            ids = [*LONG, *AFTER[:n], 5]
            more = say(ids, max_new_tokens=12, **options)
            assert list(more.ids) == greedy_reference(TARGET, ids, 12)
            assert more.stats.cached_tokens >= len(LONG) + n - 1
            assert speculation != SELF or more.stats.accepted == more.stats.evaluated > 0


@COMPANY
@WAYS
def test_the_next_turn_may_leave_out_the_token_that_ended_the_last(model, speculation, company):
    stop = AFTER[9]
    n = AFTER.index(stop)
    options = {"speculation": speculation, "reuse_cache": True}
    with speaker(model, company) as say:
        for tail in ([], [stop], [stop, stop], [END]):
            ended = say(LONG, max_new_tokens=40, stop_tokens=[stop], **options)
            assert list(ended.ids) == AFTER[: n + 1]
            ids = [*LONG, *AFTER[:n], *tail, 7, 2]
            more = say(ids, max_new_tokens=12, **options)
            assert list(more.ids) == greedy_reference(TARGET, ids, 12)
            assert more.stats.cached_tokens >= len(LONG)


@COMPANY
@WAYS
def test_a_processor_sees_nothing_after_the_token_that_ends_the_output(model, speculation, company):
    with speaker(model, company) as say:
        for stop in sorted(set(AFTER)):

            def strict(logits, history, drafts, stop=stop):
                assert stop not in [*history[len(LONG) :], *drafts]

            options = {"stop_tokens": [stop], "processors": [strict], "speculation": speculation}
            result = say(LONG, max_new_tokens=40, **options)
            assert list(result.ids) == AFTER[: AFTER.index(stop) + 1]


@COMPANY
@WAYS
def test_a_sampled_text_has_every_token_once(model, speculation, company):
    plain = model.generate(LONG, 60, SAMPLED, speculation="off")
    with speaker(model, company) as say:
        result = say(LONG, max_new_tokens=60, sampling=SAMPLED, speculation=speculation)
    assert result.ids == plain.ids
    assert (len(result.ids), result.finish_reason) == (60, "length")
    assert result.text == spelled(result.ids) == model.bundle.codec.decode(result.ids)
    stats = result.stats
    assert stats.emitted + stats.discarded == stats.accepted + stats.correction + stats.bonus == 60
    assert speculation == "off" or stats.accepted < stats.evaluated
    assert speculation != SELF or stats.accepted > 0
