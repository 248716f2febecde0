from hypothesis import given
from hypothesis import strategies as st

from dsc.runtime.ngram import Match, NgramIndex, continuation

TOKENS = st.lists(st.integers(0, 3), min_size=0, max_size=60)


def newest_longest_match(tokens: list[int], low: int, high: int) -> tuple[int, int] | None:
    """The same search without an index: every start, every length."""
    for length in range(min(high, len(tokens) - 1), low - 1, -1):
        for start in range(len(tokens) - 1, length - 1, -1):
            if tokens[start - length : start] == tokens[len(tokens) - length :]:
                return start, length
    return None


@given(tokens=TOKENS, low=st.integers(1, 3), extra=st.integers(0, 3), cuts=st.lists(st.integers(1, 9)))
def test_the_index_finds_what_a_full_search_finds(tokens, low, extra, cuts):
    index = NgramIndex(low, low + extra)
    end = 0
    for cut in [*cuts, 60]:
        end = min(end + cut, len(tokens))
        index.update(tokens[:end])
    found, expected = index.find(tokens), newest_longest_match(tokens, low, low + extra)
    assert (found is None) == (expected is None)
    if found and expected:
        assert found.start == expected[0]
        assert found.length >= expected[1]
        assert tokens[found.start - found.length : found.start] == tokens[len(tokens) - found.length :]


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
    assert index.find(text) == Match(start=6, length=5)


def test_a_copy_past_the_end_repeats_itself():
    assert continuation([7, 8, 9], start=1, count=5) == [8, 9, 8, 9, 8]
