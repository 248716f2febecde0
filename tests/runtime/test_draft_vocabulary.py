"""Drafts whose vocabulary or context is not the target's: never another output, and every pause counted."""

from __future__ import annotations

import numpy as np
import pytest
from scripted_lm import greedy_reference
from toy_bundle import toy_bundle

from dsc.runtime import load
from dsc.runtime.cached_model import CachedModel
from dsc.runtime.kv_arena import KvZone
from dsc.runtime.proposers import ModelProposer

VOCAB = 13
RNG = np.random.default_rng(11)
TARGET = RNG.normal(size=(VOCAB, VOCAB)).astype(np.float32)
PROMPT = [3, 1, 4]
PLAIN = greedy_reference(TARGET, PROMPT, 50)
EVERY_ROUND = {"proposer": "model", "window": 3, "fallback": False}


class Recorder:
    """A forward that gives `logits` and remembers every id it was fed."""

    chunk = 512

    def __init__(self, logits):
        self.logits = np.asarray([logits], np.float32)
        self.fed = []

    def forward(self, rows, past, n_logits):
        assert past == len(self.fed)
        self.fed += rows
        return self.logits


def recording_model(logits, max_length=100):
    """A draft, and what remembers its ids."""
    recorder = Recorder(logits)
    return CachedModel(recorder, KvZone("draft", {}, max_length), max_length), recorder


def test_only_shared_ids_are_proposed_and_only_known_ids_are_read():
    model, recorder = recording_model([0, 1, 2, 3, 9])
    proposer = ModelProposer("model", model, (0.6, 0.7), n_shared=4, vocab_size=5, unknown_id=2)
    assert proposer.propose([1, 7, 4, 0], 2) == [3, 3]
    assert recorder.fed == [1, 2, 4, 0, 3]


def test_a_draft_is_silent_right_after_a_token_it_does_not_know_and_past_its_context():
    model, _ = recording_model([1, 0], max_length=3)
    proposer = ModelProposer("model", model, (0.6, 0.7), n_shared=2, vocab_size=2)
    assert proposer.look([0, 5]) is None
    assert proposer.silence([0, 5]) == "token unknown to the draft"
    assert proposer.look([0, 5, 1]) == "model"
    assert proposer.look([0, 5, 1, 1]) is None
    assert proposer.silence([0, 5, 1, 1]) == "draft context full"


@pytest.mark.parametrize(("draft_vocab", "n_shared"), [(9, None), (9, 5), (20, None), (20, 1000)])
def test_a_draft_of_another_width_changes_nothing_and_its_pauses_are_counted(tmp_path, draft_vocab, n_shared):
    draft = np.full((VOCAB, draft_vocab), -9.0, np.float32)
    width = min(VOCAB, draft_vocab)
    draft[:, :width] = TARGET[:, :width]
    draft[:, VOCAB:] = 50.0  # what the target has no logit for looks best to the draft
    path = toy_bundle(tmp_path / "toy.dsmodel", TARGET, draft, draft_kind="model", n_shared=n_shared)
    result = load(path, verify="never").generate(PROMPT, 40, speculation=EVERY_ROUND)
    assert list(result.ids) == PLAIN[:40]
    assert result.stats.accepted > 0
    pauses = result.stats.fallbacks["token unknown to the draft"]
    assert (pauses > 0) == any(token >= draft_vocab for token in PLAIN[:40])


def test_a_prompt_longer_than_the_draft_s_context_is_decoded_plainly(tmp_path):
    path = toy_bundle(tmp_path / "toy.dsmodel", TARGET, TARGET, draft_kind="model", draft_max_length=20)
    result = load(path, verify="never").generate([*PROMPT, *PLAIN[:30]], 10, speculation=EVERY_ROUND)
    assert list(result.ids) == PLAIN[30:40]
    assert result.stats.proposed == 0
    assert result.stats.fallbacks["draft context full"] >= 8  # the last round has no room for drafts anyway
