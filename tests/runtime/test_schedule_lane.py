"""What a proposer may lose in a request, by what its last one left."""

from __future__ import annotations

import pytest

from dsc.bundle_schema.dflash_config import DflashConfig, Fallback
from dsc.runtime.fallback import lookup_start
from dsc.runtime.proposers import NgramProposer
from dsc.runtime.schedule_costs import LiveCosts
from dsc.runtime.schedule_lane import Lane

OWN = lookup_start(Fallback())


def request_of(proposer: NgramProposer) -> Lane:
    return Lane(0, proposer, LiveCosts((10.0, 11.0, 12.0, 13.0), (), 0.0, 0.1), DflashConfig(), 3, 1.0)


def copy(lane: Lane, accepted: int) -> None:
    """A round in which it copies one token, of which none or one holds."""
    tokens = [1, 2, 3, 4, 1, 2, 3]
    lane.offer(tokens, 3)
    assert len(lane.draft(tokens, 1)) == 1
    lane.settle(1, accepted, used=True)


@pytest.mark.parametrize(("rounds", "start"), [((), OWN), ((0,), OWN), ((1, 1), 2 * OWN)])
def test_lookups_that_held_let_the_next_request_try_as_often_again(rounds, start):
    proposer = NgramProposer(1, 3)
    before = request_of(proposer)
    for accepted in rounds:
        copy(before, accepted)
    later = request_of(proposer).account
    assert later is not None
    assert later.balance == pytest.approx(start)
