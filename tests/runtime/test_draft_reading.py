"""What a draft model reads before it drafts: all of a text, its end, or nothing where reading would not pay."""

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_lm import greedy_reference
from toy_bundle import toy_bundle

from dsc.bundle_schema.dflash_config import CalibratedPolicy, CostCurve, DflashConfig, Proposer
from dsc.runtime import load
from dsc.runtime.acceptance import AcceptanceModel
from dsc.runtime.draft_reading import LATE_AFTER, LATE_TOKENS, DraftReading
from dsc.runtime.schedule_costs import LiveCosts
from dsc.runtime.schedule_lane import SHORT_LAG, Lane
from dsc.runtime.schedule_policy import Offer, best_window
from dsc.runtime.schedule_setup import draft_prior

VERIFY_MS = tuple(20.0 + row for row in range(16))
DRAFT_MS = tuple(5.0 * k for k in range(1, 17))
LATE_MS = tuple(3.0 * k for k in range(1, 17))  # of a short text


class Reader(DraftReading):
    """A draft whose cache is the list of the positions that it has read."""

    kind = "self"
    reads = True
    sizes_blocks = False
    watch = None
    left = None
    longest = 10_000

    def __init__(self):
        self.rows = []

    @property
    def n_read(self):
        return len(self.rows)

    def forget(self, n_kept):
        del self.rows[n_kept:]

    def kind_from(self, start):
        return "late" if start else "self"

    def look(self, tokens):
        return self.kind_from(self.start)

    def room(self, tokens):
        return 16

    def prior(self, kind):
        return (0.7, 0.7) if kind == "late" else (0.9, 0.9)

    def propose(self, tokens, count):
        self.note_drafts(tokens, count)
        self.rows += range(self.start + self.n_read, len(tokens) + count - 1)
        return [0] * count


class Sharer(Reader):
    """A draft that finds all rows where the target has written them."""

    reads = False

    def lag(self, tokens, start=None):
        return 0


@given(st.lists(st.tuples(st.sampled_from(["draft", "plain", "restart", "back"]), st.integers(1, 300)), max_size=30))
def test_what_counts_as_read_is_a_gapless_part_of_the_sequence(steps):
    reader, length = Reader(), 1
    for what, number in steps:
        tokens = [0] * length
        if what == "draft":
            assert reader.lag(tokens) == max(length - 1 - reader.start - reader.n_read, 0)
            reader.propose(tokens, number % 8 + 1)
            length += number % 3
        elif what == "restart":
            starts = reader.starts(tokens, number)
            assert starts[0] == reader.start
            assert len(starts) <= (3 if number >= LATE_AFTER else 2)
            reader.begin(starts[number % len(starts)])
        else:
            length = length + number if what == "plain" else max(length - number, 1)
        reader.rewind(length - 1)
        assert reader.rows == list(range(reader.start, reader.start + reader.n_read))
        assert reader.start <= max(length - 1, 0)
        assert reader.start + reader.n_read <= length - 1


@pytest.mark.parametrize("held", range(5))
def test_after_a_rejection_the_drafts_that_held_are_not_read_again(held):
    """What adaptive rollback saves a draft: the rows of the drafts that held, but the last."""
    lags = {}
    for adaptive in (True, False):
        reader, tokens = Reader(), [0] * 10
        reader.adaptive_rollback = adaptive
        reader.propose(tokens, 4)
        tokens = [0] * (10 + held + 1)
        reader.rewind(len(tokens) - 1)
        lags[adaptive] = reader.lag(tokens)
    assert lags == ({True: 1, False: 1} if held == 4 else {True: 0, False: held})


def lane(read_ms: float, late_ms=LATE_MS) -> Lane:
    costs = LiveCosts(VERIFY_MS, DRAFT_MS, 0.0, 0.1, read_ms, late_ms=late_ms)
    return Lane(0, Reader(), costs, DflashConfig(), 8, 1.0)


def start_of(read_ms: float, n_tokens: int, room: int, rate: float = 1.0, late_ms=LATE_MS, generated=LATE_AFTER) -> str:
    made = lane(read_ms, late_ms)
    offer = made.offer([0] * n_tokens, room, generated, rate)
    if isinstance(offer, str):
        return offer
    made.draft([0] * n_tokens, best_window(offer)[0])
    return "late" if made.start else "whole"


def test_a_draft_reads_a_long_text_only_where_the_rest_of_the_output_can_pay_for_it():
    assert start_of(read_ms=1.0, n_tokens=1000, room=2000) == "late"
    assert start_of(read_ms=1.0, n_tokens=50, room=100) == "whole"
    assert start_of(read_ms=0.05, n_tokens=1000, room=2000) == "whole"
    assert start_of(read_ms=2.0, n_tokens=100, room=5) == "reading does not pay"
    assert start_of(read_ms=1.0, n_tokens=1000, room=3) == "reading does not pay"


def test_no_draft_reads_more_than_a_request_may_lose():
    assert start_of(read_ms=4.0, n_tokens=1000, room=2000) == "reading not covered"
    assert start_of(read_ms=1.0, n_tokens=100, room=100) == "late"


def lost_in_answers(reader: Reader) -> list[float]:
    """Plain steps lost in each of eight answers of 64 tokens, of which no draft holds."""
    lost = []
    for _ in range(8):
        costs = LiveCosts(VERIFY_MS, DRAFT_MS, 0.0, 0.1, 1.0, late_ms=LATE_MS)
        made, tokens = Lane(0, reader, costs, DflashConfig(), 8, 1.0), [0] * 50
        reader.rewind(0)
        lost.append(0.0)
        while len(tokens) < 50 + 64:
            offer = made.offer(tokens, 50 + 64 - len(tokens), len(tokens) - 50, 1.0)
            window = best_window(offer)[0] if isinstance(offer, Offer) else 0
            drafted = len(made.draft(tokens, window)) if window else 0
            made.settle(drafted, 0, used=drafted > 0)
            lost[-1] += made.cost - 1 if drafted else 0
            reader.rewind(len(tokens))
            tokens = [*tokens, 0]
    return lost


def test_a_request_starts_with_what_the_one_before_has_left():
    """Answers too short to earn what a draft model lost would else lose it again each time."""
    lost = lost_in_answers(Reader())
    assert 1.5 < lost[0] <= 5
    assert sum(lost[1:]) <= 0.03 * 7 * 64


def test_a_draft_that_has_nothing_to_read_can_always_afford_one_try():
    lost = lost_in_answers(Sharer())
    one_try = (VERIFY_MS[1] + DRAFT_MS[0]) / VERIFY_MS[0] - 1
    assert lost[0] > 2 * one_try
    assert all(one_try < later < 1.1 * one_try + 0.01 * 64 for later in lost[1:])


def test_what_was_lost_is_earned_again_though_looking_costs_more_than_a_token_earns():
    reader, tried = Reader(), []
    fast = tuple(ms / 6 for ms in VERIFY_MS)  # looking takes 0.03 of a step, a token earns 0.0075
    for _ in range(12):
        costs = LiveCosts(fast, [ms / 6 for ms in DRAFT_MS], 0.0, 0.1, 0.1, late_ms=[ms / 6 for ms in LATE_MS])
        made, tokens = Lane(0, reader, costs, DflashConfig(), 8, 1.0), [0] * 60
        reader.rewind(0)
        tried.append(0)
        for _ in range(100):
            offer = made.offer(tokens, 200, len(tokens) - 60, 1.0)
            window = best_window(offer)[0] if isinstance(offer, Offer) else 0
            drafted = len(made.draft(tokens, window)) if window else 0
            made.settle(drafted, 0, used=drafted > 0)
            tried[-1] += drafted > 0
            reader.rewind(len(tokens))
            tokens = [*tokens, 0]
    assert tried[0] > 0
    assert any(tried[3:]), tried


def test_a_late_draft_needs_some_output_to_read():
    assert start_of(read_ms=1.0, n_tokens=100, room=100, generated=LATE_AFTER - 1) == "reading not covered"
    assert start_of(read_ms=1.0, n_tokens=50, room=100, generated=0) == "whole"


def test_what_the_request_reached_without_the_draft_is_what_its_reading_must_beat():
    assert start_of(read_ms=1.0, n_tokens=50, room=100, rate=1.2) == "whole"
    assert start_of(read_ms=1.0, n_tokens=50, room=100, rate=2.5) == "reading does not pay"


def test_a_late_draft_goes_back_to_the_beginning_when_its_guesses_are_poor_and_it_has_won_what_that_costs():
    made = lane(read_ms=1.0)
    tokens = [0] * 150
    starts = []
    for _ in range(40):
        offer = made.offer(tokens, 2000, 1000, 1.0)
        if isinstance(offer, Offer) and best_window(offer)[0]:
            drafted = len(made.draft(tokens, best_window(offer)[0]))
            starts.append(made.start)
            made.settle(drafted, min(drafted, 2 if made.start else 4), used=drafted > 0)
            made.proposer.rewind(len(tokens))
        else:
            made.settle(0, 0, used=False)
        tokens = [0] * (len(tokens) + 1)
    assert starts[0] == 150 - 1 - LATE_TOKENS
    assert starts[-1] == 0


def test_acceptance_fades_by_every_round_also_by_those_in_which_nobody_looked():
    made = Lane(0, Reader(), LiveCosts(VERIFY_MS, DRAFT_MS, 0.0, 0.1), DflashConfig(), 8, None)
    expected = AcceptanceModel(0.9, 0.9, 4.0, 40.0)  # Reader's prior, prior_rounds, 1 / decay

    def seen():
        offer = made.offer([0] * 10, 100)
        assert isinstance(offer, Offer)
        return offer.acceptance.survivals(3)

    seen()
    made.settle(4, 0, used=True)
    expected.observe(4, 0)
    expected.fade()
    for _ in range(7):  # as while it cools down
        made.settle(0, 0, used=False)
        expected.fade()
    assert seen() == pytest.approx(expected.survivals(3))
    assert seen() == pytest.approx(expected.survivals(3))  # looking twice in a round fades nothing


def test_a_small_lag_is_paid_in_one_round():
    made = lane(read_ms=1.0)
    made.proposer.propose([0] * 100, 1)
    offer = made.offer([0] * (100 + SHORT_LAG), 100)
    assert offer.costs[1] > lane(1.0).offer([0], 100).costs[1]
    assert made.proposer.lag([0] * (100 + SHORT_LAG)) == SHORT_LAG - 1


@pytest.mark.parametrize(("measured", "expected"), [(None, 0.95), (0.31, 0.31), (0.0, 0.05), (1.0, 0.98)])
def test_a_draft_is_expected_to_be_as_good_as_it_was_when_the_bundle_was_compiled(measured, expected):
    config = DflashConfig(proposers={"self": Proposer(acceptance=measured)})
    assert draft_prior(config, "self") == expected


VOCAB = 13
RNG = np.random.default_rng(3)
TARGET = RNG.normal(size=(VOCAB, VOCAB)).astype(np.float32)


@pytest.mark.parametrize(("read_ms", "late"), [(1.5, True), (0.001, False)])
def test_a_late_start_changes_no_token_and_shows_in_the_trace(tmp_path, read_ms, late):
    curve = CostCurve(device="toy", verify_ms=VERIFY_MS, draft_ms={"self": DRAFT_MS}, read_ms={"self": read_ms})
    config = DflashConfig(
        policy="calibrated",
        costs=(curve,),
        proposers={"self": Proposer(), "ngram": Proposer(enabled=False)},
        calibrated=CalibratedPolicy(refresh_costs=False),
    )
    draft = TARGET + 0.2 * RNG.normal(size=TARGET.shape).astype(np.float32)
    path = tmp_path / "toy.dsmodel"
    toy_bundle(path, TARGET, draft, draft_kind="self", max_length=1024, config=config, history=False)
    prompt = RNG.integers(0, VOCAB, 400).tolist()
    file = io.StringIO()
    model = load(path, verify="never")
    for length in (400, 390):  # the second prompt is the beginning of the first
        result = model.generate(prompt[:length], 200, trace=file)
        assert list(result.ids) == greedy_reference(TARGET, prompt[:length], 200, history=False)
    rounds = [json.loads(line) for line in file.getvalue().splitlines()]
    starts = [line["start"] for line in rounds if line["event"] == "round" and line["draft_ids"]]
    assert starts
    assert all(starts) if late else not any(starts)
    if late:
        assert starts[0] == 400 + LATE_AFTER - 1 - LATE_TOKENS
