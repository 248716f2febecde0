"""Logits processors: the exact history, bans, and errors of their own."""

import numpy as np
import pytest
from scripted_lm import greedy_reference
from scripted_text import OPTIONS, PLAIN, PROMPT, TARGET, VOCAB, first_index

from dsc.bundle_schema.errors import GenerationError


def ban(*tokens: int):
    def hook(logits, history, drafts):
        logits[:, list(tokens)] = -np.inf

    return hook


def test_banned_tokens_stay_banned_in_blocks(model, speculation):
    banned = PLAIN[3]
    table = TARGET.copy()
    table[:, banned] = -np.inf
    result = model.generate(PROMPT, 30, speculation=speculation, processors=[ban(banned)])
    assert list(result.ids) == greedy_reference(table, PROMPT, 30)


def test_a_processor_sees_each_row_s_exact_history(model, speculation):
    def check(logits, history, drafts):
        assert len(logits) == len(drafts) + 1
        for i, row in enumerate(logits):
            seen = [*history, *drafts[:i]]
            earlier = sum((position % 7 + 1) * token for position, token in enumerate(seen[:-1]))
            np.testing.assert_array_equal(row, TARGET[(seen[-1] + earlier) % VOCAB])

    model.generate(PROMPT, 30, speculation=speculation, processors=[check])


def test_a_processor_is_not_asked_after_the_end(model):
    stop = PLAIN[6]

    def strict(logits, history, drafts):
        assert stop not in [*history[len(PROMPT) :], *drafts]

    for speculation in OPTIONS:
        result = model.generate(PROMPT, 50, stop_tokens=[stop], processors=[strict], speculation=speculation)
        assert list(result.ids) == PLAIN[: first_index(stop) + 1]


def test_an_exception_in_a_processor_leaves_the_model_usable(model, speculation):
    def fail(logits, history, drafts):
        if len(history) > 9:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        model.generate(PROMPT, 30, speculation=speculation, processors=[fail])
    ids = [*PROMPT, *PLAIN[:3]]
    result = model.stream(ids, 20, speculation=speculation, reuse_cache=True).finish()
    assert list(result.ids) == PLAIN[3:23]
    assert list(model.generate(PROMPT, 30, speculation=speculation).ids) == PLAIN[:30]


def test_when_everything_is_banned_the_error_says_so(model):
    with pytest.raises(GenerationError, match="a token with a finite logit is required, got -inf"):
        model.generate(PROMPT, 3, processors=[ban(*range(VOCAB))])
