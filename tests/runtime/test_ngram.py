from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dsc.runtime.ngram import Match, NgramIndex, continuation
from dsc.runtime.proposers import NgramProposer

TOKENS = st.lists(st.integers(0, 3), min_size=0, max_size=60)


def best_match(tokens: list[int], low: int, high: int) -> Match | None:
    """The same choice without an index: every start is compared, the newest 16 that match have a say."""
    found = []
    for start in range(len(tokens) - 1, low - 1, -1):
        length = 0
        while length < min(start, 32) and tokens[start - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= low:
            found.append((length, start))
    found = found[:16]
    votes = Counter()
    for length, start in found:
        votes[tokens[start]] += 4 ** min(length, high)
    agreeing = [place for place in found if tokens[place[1]] == votes.most_common(1)[0][0]]
    return Match(max(agreeing)[1], max(agreeing)[0], len(agreeing), len(found)) if found else None


@given(tokens=TOKENS, low=st.integers(1, 3), extra=st.integers(0, 3), cuts=st.lists(st.integers(1, 9)))
def test_the_index_finds_what_a_full_search_finds(tokens, low, extra, cuts):
    index = NgramIndex(low, low + extra)
    end = 0
    for cut in [*cuts, 60]:
        end = min(end + cut, len(tokens))
        index.update(tokens[:end])
    assert index.find(tokens) == best_match(tokens, low, low + extra)


@given(tokens=TOKENS, keep=st.integers(0, 60), more=TOKENS)
def test_after_truncation_nothing_of_the_old_text_is_left(tokens, keep, more):
    index = NgramIndex(1, 3)
    index.update(tokens)
    index.truncate(min(keep, len(tokens)))
    text = tokens[:keep] + more
    index.update(text)
    fresh = NgramIndex(1, 3)
    fresh.update(text)
    assert index.find(text) == fresh.find(text)


def test_the_end_itself_is_not_a_match():
    index = NgramIndex(1, 3)
    index.update([1, 2, 3])
    assert index.find([1, 2, 3]) is None


def test_a_match_counts_the_whole_common_suffix():
    text = [9, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    index = NgramIndex(1, 2)
    index.update(text)
    assert index.find(text) == Match(start=6, length=5, agreeing=1, occurrences=1)


def test_what_followed_more_often_is_proposed_and_a_longer_match_says_more():
    text = [1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2]
    index = NgramIndex(2, 8)
    index.update(text)
    assert index.find(text) == Match(start=5, length=2, agreeing=2, occurrences=3)
    text = [9, 1, 2, 8, 5, 1, 2, 7, 6, 1, 2, 7, 9, 1, 2]
    index = NgramIndex(2, 8)
    index.update(text)
    assert index.find(text) == Match(start=3, length=3, agreeing=1, occurrences=3)


def test_every_kind_of_match_has_a_prior():
    lengths = ("1", "2", "3", "4-7", "8-15", "16+")
    priors = [
        NgramProposer().prior(f"{length} {what}") for length in lengths for what in ("only", "all", "most", "few")
    ]
    assert all(0 < share < 1 for prior in priors for share in prior)
    proposer = NgramProposer(1, 8)
    assert proposer.look([5, 6, 1, 5]) == "1 only"
    assert proposer.look([5, 6, 1, 5, 6]) == "2 only"
    assert proposer.look([5, 6, 1, 5, 6, 1, 5]) == "4-7 all"


def test_a_copy_past_the_end_repeats_itself():
    assert continuation([7, 8, 9], start=1, count=5) == [8, 9, 8, 9, 8]
