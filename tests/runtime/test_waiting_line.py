from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsc.bundle_schema.errors import GenerationError
from dsc.runtime.waiting_line import WaitingLine


def ticket(tenant, number=0):
    return SimpleNamespace(tenant=tenant, number=number, cancelled=False)


def served(line, count):
    return [line.next()[0] for _ in range(count)]


def test_tenants_of_equal_weight_take_turns_and_keep_their_order():
    line = WaitingLine(100)
    for number in range(4):
        line.add(ticket("many", number), None)
    line.add(ticket("few", 9), None)
    found = served(line, 5)
    assert [item.tenant for item in found] == ["many", "few", "many", "many", "many"]
    assert [item.number for item in found if item.tenant == "many"] == [0, 1, 2, 3]
    assert line.next() is None


@given(st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]), min_size=2))
def test_turns_are_shared_by_weight(weights):
    line = WaitingLine(10_000, weights.__getitem__)
    for tenant in weights:
        for _ in range(400):
            line.add(ticket(tenant), None)
    total = 200
    turns = Counter(item.tenant for item in served(line, total))
    for tenant, weight in weights.items():
        assert abs(turns[tenant] - total * weight / sum(weights.values())) <= len(weights)


def test_a_tenant_that_was_away_has_no_turns_saved_up():
    line = WaitingLine(1000)
    for _ in range(100):
        line.add(ticket("busy"), None)
    line.add(ticket("guest"), None)
    served(line, 50)
    for _ in range(20):
        line.add(ticket("guest"), None)
    turns = Counter(item.tenant for item in served(line, 10))
    assert turns == {"busy": 5, "guest": 5}


def test_a_full_line_refuses():
    line = WaitingLine(1)
    line.add(ticket("a"), None)
    with pytest.raises(GenerationError, match="1 requests wait already"):
        line.add(ticket("b"), None)
