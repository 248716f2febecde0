"""A speculator looks for proposals; where they are not worth a draft it does so more rarely."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dsc.bundle_schema.dflash_config import DflashConfig
from dsc.runtime.proposers import NgramProposer
from dsc.runtime.schedule_config import LiveConfig
from dsc.runtime.schedule_costs import LiveCosts
from dsc.runtime.speculator import SpeculationOptions, Speculator


class Counting(NgramProposer):
    """Prompt lookup that counts its lookups."""

    n_looks = 0

    def look(self, tokens: Sequence[int]) -> str | None:
        self.n_looks += 1
        return super().look(tokens)


def speculator(proposer: NgramProposer, verify_ms: Sequence[float]) -> Speculator:
    costs = LiveCosts(verify_ms, (), 0.2, 0.05)
    return Speculator([(proposer, costs)], SpeculationOptions(), LiveConfig(DflashConfig()), n_prompt=1)


def rounds(run: Speculator, tokens: list[int], following: Sequence[int]) -> list[str]:
    """Decode `following`, none of it as drafted; the reason of each round, empty for one that drafted."""
    reasons = []
    for token in following:
        draft = run.propose(tokens, 100)
        reasons.append(draft.reason)
        tokens.append(token)
        run.settle(len(draft.ids), 0)
    return reasons


STEEP = [3.0 + 4.0 * drafts for drafts in range(16)]  # a draft costs more than a plain step: nothing pays


def test_what_never_pays_is_looked_for_in_every_fourth_round():
    proposer = Counting()
    reasons = rounds(speculator(proposer, STEEP), [1, 2, 1], [2, 1] * 100)
    assert reasons.count("does not pay") == 200
    assert proposer.n_looks == pytest.approx(200 / 4, abs=4)


def test_a_text_without_matches_is_looked_at_more_and_more_rarely():
    proposer = Counting()
    run, tokens = speculator(proposer, STEEP), [0]
    looks = []
    for _ in range(10):
        assert rounds(run, tokens, range(len(tokens), len(tokens) + 8)) == ["no proposal"] * 8
        looks.append(proposer.n_looks)
    assert looks[0] == 8
    assert looks[-1] - looks[-2] == 2


def test_a_match_is_found_within_four_rounds_of_a_rest():
    proposer = Counting()
    run, tokens = speculator(proposer, [3.0 + 0.01 * rows for rows in range(16)]), list(range(40))
    rounds(run, tokens, range(40, 100))
    assert "" in rounds(run, tokens, range(8))  # from the third token on there is a match


def test_a_request_without_fall_back_looks_in_every_round():
    proposer = Counting()
    costs = LiveCosts(STEEP, (), 0.2, 0.05)
    options = SpeculationOptions(fallback=False)
    run = Speculator([(proposer, costs)], options, LiveConfig(DflashConfig()), n_prompt=1)
    rounds(run, [0], range(1, 101))
    assert proposer.n_looks == 100


def test_what_pays_again_is_found_within_four_rounds():
    proposer = Counting()
    run = speculator(proposer, STEEP)
    tokens = [1, 2, 1]
    rounds(run, tokens, [2, 1] * 20)
    run._lanes[0].live_costs = LiveCosts([3.0 + 0.01 * rows for rows in range(1, 17)], (), 0.2, 0.05)
    run._lanes[0].refresh()
    assert "" in rounds(run, tokens, [2, 1, 2, 1])


def test_a_round_that_does_not_look_does_not_pay_for_looking():
    proposer = Counting()
    run = speculator(proposer, STEEP)
    account = run._lanes[0].account
    account.balance = 5.0  # over the price of a draft, which looking leaves
    balances = []
    tokens = [1, 2, 1]
    for _ in range(40):
        rounds(run, tokens, [2, 1])
        balances.append((proposer.n_looks, account.balance))
    (looks, first), (more, last) = balances[5], balances[-1]
    assert last - first == pytest.approx(68 * account.allowance - (more - looks) * run._lanes[0]._look_cost)


def test_a_cool_down_asks_nobody_and_every_token_of_it_earns(monkeypatch):
    run = speculator(Counting(), [3.0 + drafts for drafts in range(16)])
    (lane,) = run._lanes
    asked, offer = [], lane.offer
    monkeypatch.setattr(lane, "offer", lambda *arguments: asked.append(1) or offer(*arguments))
    lane.account.balance = 0.0
    reasons = rounds(run, [1, 2, 1], [2, 1] * 20)
    cooled = reasons.count("cool-down")
    assert cooled >= 20
    # the first round of a cool-down has asked, and so has the one that finds that it goes on
    assert len(asked) <= len(reasons) - cooled + 2 * cooled / DflashConfig().fallback.cooldown_rounds + 1
    looked = 40 * 0.1 / 3  # at most, had every round looked
    assert 40 * lane.account.allowance - looked <= lane.account.balance <= 40 * lane.account.allowance
