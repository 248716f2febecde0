"""Admission and the output's distribution, by exact enumeration of two-token texts (DSpark, Appendix A).

A draft is sampled from q and verified by rejection sampling, if it is admitted. An admission that looks at the
confidence of the second position knows which token was sampled at the first, and so verifies some tokens more often
than others.
"""

from collections.abc import Callable
from fractions import Fraction
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from dsc.runtime.schedule_admission import admitted_prefix

Admission = Callable[[list[float], list[float]], int]
SPEED = [1.0, 0.5, 0.45]
P, Q = (Fraction(7, 10), Fraction(3, 10)), (Fraction(1, 2), Fraction(1, 2))
A1, C2 = 0.8, (0.9, 0.1)  # survival of the first position; confidence of the second after token 0 and after token 1


def ours(survival: list[float], speed: list[float]) -> int:
    return admitted_prefix([survival], [1 / rate for rate in speed])[0]


def looks_ahead(survival: list[float], speed: list[float]) -> int:
    """The best prefix of all, also past a fall."""
    return max(range(len(survival) + 1), key=lambda n: (1 + sum(survival[:n])) * speed[n])


def verified(p, q, x: int) -> list[Fraction]:
    """Distribution of the token that rejection sampling emits for the draft `x`."""
    accept = min(Fraction(1), p[x] / q[x])
    rest = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
    total = sum(rest)
    return [accept * (token == x) + (1 - accept) * (rest[token] / total if total else p[token]) for token in (0, 1)]


def output(admit: Admission, p, q, p2, a1: float, c2, speed: list[float]) -> dict[tuple[int, int], Fraction]:
    """Distribution of the first two tokens of the output."""
    law = dict.fromkeys(product((0, 1), repeat=2), Fraction(0))
    for x in (0, 1):
        n = admit([a1, a1 * c2[x]], speed)
        first = verified(p, q, x) if n else list(p)
        for y, z in law:  # the second token is the target's own: drawn, or verified against a draft of its own
            law[y, z] += q[x] * first[y] * p2[y][z]
    return law


def plain(p, p2) -> dict[tuple[int, int], Fraction]:
    return {(y, z): p[y] * p2[y][z] for y, z in product((0, 1), repeat=2)}


P2 = ((Fraction(1, 4), Fraction(3, 4)), (Fraction(2, 3), Fraction(1, 3)))


def first_token(law) -> list[Fraction]:
    return [law[y, 0] + law[y, 1] for y in (0, 1)]


def test_looking_at_later_tokens_shifts_the_output():
    law = output(looks_ahead, P, Q, P2, A1, C2, SPEED)
    assert first_token(law) == [Fraction(85, 100), Fraction(15, 100)]


def test_our_admission_leaves_it_as_it_is():
    assert output(ours, P, Q, P2, A1, C2, SPEED) == plain(P, P2)


SHARES = st.fractions(Fraction(1, 20), Fraction(19, 20), max_denominator=20)


@given(SHARES, SHARES, SHARES, SHARES, st.floats(0, 1), st.tuples(st.floats(0, 1), st.floats(0, 1)),
       st.lists(st.floats(0.05, 2), min_size=3, max_size=3))  # fmt: skip
def test_our_admission_is_lossless_whatever_the_numbers(p, q, s, t, a1, c2, speed):
    law = (p, 1 - p)
    second = ((s, 1 - s), (t, 1 - t))
    assert output(ours, law, (q, 1 - q), second, a1, c2, speed) == plain(law, second)
