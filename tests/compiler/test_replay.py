"""What speculation may lose against plain decoding, a draft's reading included, on texts replayed without models."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from dsc.bundle_schema.dflash_config import MAX_WINDOW, DflashConfig, Proposer
from dsc.compiler.replay import ReplaySetup, replay
from dsc.compiler.trace_reader import RequestLine, RoundLine, TracedRequest
from dsc.runtime.fallback import SHORT_ANSWER, model_start
from dsc.runtime.schedule_costs import LiveCosts
from dsc.runtime.speculator import SpeculationOptions

LARGEST_MODEL_START = model_start(100.0)


def traced(prompt: list[int], new: list[int]) -> TracedRequest:
    request = RequestLine(
        event="request",
        schema_version="1.2",
        name="toy",
        model="0",
        policy="calibrated",
        speculation="off",
        max_tokens=len(prompt) + len(new),
        stop_ids=[],
        prompt_ids=prompt,
    )
    whole = RoundLine(
        event="round", n_tokens=len(prompt), proposer="", draft_ids=[], accepted=0, new_ids=new, ms={"forward": 1.0}
    )
    return TracedRequest(request, [whole], len(new))


def lost_steps(kinds, request, acceptance, row_cost, step_cost, read_cost) -> float:
    """Plain steps that a replay took beyond those of plain decoding."""
    draft = tuple(step_cost * k for k in range(1, MAX_WINDOW + 1))
    verify = tuple(1 + row_cost * row for row in range(MAX_WINDOW))

    def costs(kind, *_):
        return LiveCosts(verify, draft if kind == "self" else (), 0.0, 0.0, read_cost if kind == "self" else 0.0)

    config = DflashConfig(policy="calibrated", proposers={kind: Proposer() for kind in kinds})
    setup = ReplaySetup(
        config=config,
        options=SpeculationOptions(),
        kinds=kinds,
        decide=costs,
        spend=lambda kind, context, late: costs(kind).costs(late),
        rates={"self": (acceptance, 0.95)},
    )
    counts = replay(setup, [request])
    return counts.ms - counts.plain_ms


@settings(max_examples=60)
@given(
    st.sampled_from([("self",), ("self", "ngram"), ("ngram",)]),
    st.integers(0, 2**32),
    st.integers(2, 600),
    st.integers(4, 300),
    st.sampled_from([0.0, 0.1, 0.4, 0.8, 1.0]),
    st.sampled_from([2, 50, 5000]),
    st.floats(0.02, 0.4),
    st.floats(0.02, 0.5),
    st.floats(0.001, 0.2),
)
def test_no_draft_loses_more_than_its_start_and_half_of_the_overhead(
    kinds, seed, n_prompt, n_new, acceptance, vocabulary, row_cost, step_cost, read_cost
):
    rng = random.Random(seed)
    ids = [rng.randrange(vocabulary) for _ in range(n_prompt + n_new)]
    lost = lost_steps(kinds, traced(ids[:n_prompt], ids[n_prompt:]), acceptance, row_cost, step_cost, read_cost)
    allowance = DflashConfig().fallback.max_overhead / 3
    start = LARGEST_MODEL_START * ("self" in kinds) + SHORT_ANSWER * allowance * ("ngram" in kinds) / len(kinds)
    assert lost <= start + allowance * n_new + 1e-6


def test_a_draft_that_is_right_after_its_reading_is_used():
    """The bound is not kept by never drafting."""
    rng = random.Random(1)
    ids = [rng.randrange(5000) for _ in range(1100)]
    assert lost_steps(("self",), traced(ids[:1000], ids[1000:]), 1.0, 0.05, 0.2, 0.05) < -15
