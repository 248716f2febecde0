"""The tokens that a verdict lets out have the target's law, exactly; the same check finds wrong rules biased."""

from __future__ import annotations

import numpy as np
import pytest
from verdict_law import (
    ACCURACY,
    TableModel,
    drafts_of,
    emitted_law,
    near_model,
    plain_distribution,
    random_model,
    total_variation,
    verdict_law,
)
from verdicts import IMPLEMENTATIONS, by_body, by_reference, settings

from dsc.kernels.speculative_verify_rules import tree_rule

RULES = ["deterministic", "rejection dense", "rejection sparse", "block dense", "block sparse"]
FILTERS = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.3, "top_k": 2},
    "top-p": {"temperature": 1.0, "top_p": 0.83},
    "min-p": {"temperature": 1.2, "min_p": 0.21},
    "all": {"temperature": 1.1, "top_k": 3, "top_p": 0.91, "min_p": 0.06},
}


def q_inputs(proposal, drafts, kind, copies):
    """The proposal's rows along a block, dense or on their support with an unused column."""
    vocab = proposal.vocab
    rows = [proposal.probs(drafts[:i]) for i in range(len(drafts))]
    q = np.reshape(rows, (len(drafts), vocab)).astype(np.float32)
    if kind == "dense":
        return {"q": np.tile(q, (copies, 1, 1))}
    order = np.argsort(-q, axis=-1, kind="stable")
    ids = np.concatenate([order, order[:, :1]], axis=1)
    weights = np.take_along_axis(q, ids, -1)
    weights[:, -1] = 0
    return {"q": np.tile(weights, (copies, 1, 1)), "q_ids": np.tile(ids.astype(np.int32), (copies, 1, 1))}


def law_of(judge, rule, target, drafts, scored=None, length=None):
    """The law of the verdict over one block, the proposal being scored as `scored`."""
    mode, _, kind = rule.partition(" ")
    k = len(drafts)
    length = k if length is None else length
    logits = np.stack([target.rows[drafts[:i]] for i in range(k + 1)])

    def judged(uniforms):
        copies = len(uniforms)
        spread = np.full((copies, k + 1), 0.5)
        spread[:, :length], spread[:, -1] = uniforms[:, :length], uniforms[:, -1]
        inputs = {
            "logits": np.tile(logits, (copies, 1, 1)),
            "draft_ids": np.tile(np.reshape(drafts, (1, k)).astype(np.int64), (copies, 1)),
            "draft_lengths": np.full(copies, length, np.int32),
            "uniforms": spread,
            **settings(copies, **target.filters),
            **(q_inputs(scored, drafts, kind, copies) if kind else {}),
        }
        found = judge(inputs, mode)
        np.testing.assert_array_equal(found["cause"], found["n_accepted"] < length)
        return np.arange(length) < found["n_accepted"][:, None], found["next_token"]

    return verdict_law(judged, [range(i) for i in range(length)], target.vocab)


def bias(judge, rule, target, proposal, n_drafts, scored=None):
    """How far the emitted tokens are from the target's law, in total variation."""
    scored = proposal if scored is None else scored
    found = emitted_law(target, proposal, n_drafts, lambda drafts: law_of(judge, rule, target, drafts, scored))
    return total_variation(found, dict(target.law(n_drafts + 1)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("rule", RULES)
def test_one_draft_leaves_the_targets_law(rule, filters, implementation):
    target = random_model(1, vocab=4, depth=2, **FILTERS[filters])
    proposal = None if rule == "deterministic" else random_model(2, vocab=4, depth=1, temperature=0.8)
    assert bias(IMPLEMENTATIONS[implementation], rule, target, proposal, 1) < ACCURACY


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("filters", ["temperature", "all"])
@pytest.mark.parametrize("rule", RULES)
def test_two_drafts_leave_the_targets_law(rule, filters, implementation):
    target = random_model(3, vocab=3, depth=3, **{**FILTERS[filters], "top_k": 0})
    proposal = None if rule == "deterministic" else random_model(4, vocab=3, depth=2)
    assert bias(IMPLEMENTATIONS[implementation], rule, target, proposal, 2) < ACCURACY


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", RULES[1:])
def test_two_drafts_near_the_target_leave_its_law(rule, seed):
    """Residuals of several tokens, so that their shape matters and not only where they are."""
    target = random_model(seed, vocab=5, depth=3)
    assert bias(by_body, rule, target, near_model(seed, target, 0.6), 2) < ACCURACY


def test_block_rule_over_three_drafts_leaves_the_targets_law():
    target, proposal = random_model(5, vocab=2, depth=4), random_model(6, vocab=2, depth=3)
    for rule in ("rejection dense", "block dense"):
        assert bias(by_body, rule, target, proposal, 3) < ACCURACY


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_control_argmax_drafts_scored_with_a_softmax_are_biased(implementation):
    target, q = random_model(1, vocab=4, depth=2), random_model(2, vocab=4, depth=1)
    always = TableModel(4, {prefix: row * 100 for prefix, row in q.rows.items()})
    judge = IMPLEMENTATIONS[implementation]
    assert bias(judge, "rejection dense", target, always, 1, scored=q) > 0.03
    assert bias(judge, "rejection dense", target, always, 1, scored=always) < ACCURACY


@pytest.mark.parametrize("rule", ["rejection dense", "block dense"])
def test_control_drafts_from_another_temperature_than_scored_are_biased(rule):
    target, q = random_model(1, vocab=4, depth=2), random_model(2, vocab=4, depth=1)
    hotter = TableModel(4, q.rows, {"temperature": 1.3})
    assert bias(by_reference, rule, target, hotter, 1, scored=q) > 1e-3


def scheduled_length(survivals, steps_per_second, early_stop):
    """Drafts to verify: the expected tokens a second are maximised over prefixes, or up to the first fall."""
    expected = 1.0
    best, length = steps_per_second[0], 0
    for i, survival in enumerate(survivals, start=1):
        expected += survival
        if expected * steps_per_second[i] > best:
            best, length = expected * steps_per_second[i], i
        elif early_stop:
            break
    return length


@pytest.mark.parametrize(("early_stop", "first"), [(True, 0.7), (False, 0.85)])
def test_control_a_length_chosen_from_later_tokens_is_biased(early_stop, first):
    """The counterexample of DSpark's appendix A: the second survival depends on the first draft itself."""
    target_row, draft_row = np.log([0.7, 0.3]), np.log([0.5, 0.5])
    prefixes = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    target = TableModel(2, dict.fromkeys(prefixes, target_row.astype(np.float32)))
    proposal = TableModel(2, dict.fromkeys(prefixes[:3], draft_row.astype(np.float32)))

    def judged(drafts):
        survivals = [0.8, 0.8 if drafts[0] == 0 else 0.0]
        length = scheduled_length(survivals, [1.0, 0.5, 0.45], early_stop)
        return law_of(by_reference, "rejection dense", target, drafts, proposal, length)

    found = emitted_law(target, proposal, 2, judged)
    assert sum(p for tokens, p in found.items() if tokens[0] == 0) == pytest.approx(first, abs=1e-6)


def expected_accepted(rule, target, proposal, n_drafts):
    return sum(
        chance * share * len(held)
        for drafts, chance in drafts_of(target, proposal, n_drafts)
        for (held, _), share in law_of(by_reference, rule, target, drafts, proposal).items()
    )


@pytest.mark.parametrize("seed", range(4))
def test_block_rule_accepts_at_least_as_many(seed):
    target, proposal = random_model(seed, vocab=3, depth=2), random_model(seed + 50, vocab=3, depth=2)
    token, block = (expected_accepted(f"{rule} dense", target, proposal, 2) for rule in ("rejection", "block"))
    assert block > token - ACCURACY
    assert block > token * 1.002


@pytest.mark.parametrize("rule", ["rejection dense", "rejection sparse", "block dense"])
def test_point_masses_as_q_give_the_deterministic_verdict(rule):
    target = random_model(8, vocab=3, depth=3, temperature=0.9)
    ((drafts, _),) = drafts_of(target, None, 2)
    rows = {drafts[:i]: np.where(np.arange(3) == drafts[i], 0, -np.inf) for i in range(2)}
    one = law_of(by_reference, "deterministic", target, drafts)
    other = law_of(by_reference, rule, target, drafts, TableModel(3, rows))
    assert {key for key in one if one[key] > ACCURACY} == {key for key in other if other[key] > ACCURACY}
    for key in one:
        assert one[key] == pytest.approx(other[key], abs=ACCURACY)


TREE_TOKENS, TREE_PARENTS = (2, 0, 1, 2, 0), (0, 0, 1, 1, 2)  # rows: 1 and 2 below the root, 3 and 4 below 1, 5 below 2


def tree_text(row):
    """The tokens from the root to a row."""
    return () if row == 0 else (*tree_text(TREE_PARENTS[row - 1]), TREE_TOKENS[row - 1])


def tree_law(rule, target):
    """The law of the next three tokens after one verdict over the tree and plain sampling."""
    p = np.stack([target.probs(tree_text(row)) for row in range(len(TREE_TOKENS) + 1)])

    def judged(uniforms):
        verdicts = [rule(p, TREE_TOKENS, TREE_PARENTS, u) for u in uniforms]
        held = [[node + 1 in verdict.path for node in range(len(TREE_TOKENS))] for verdict in verdicts]
        return np.array(held), np.array([verdict.next_token for verdict in verdicts])

    ancestors = [[parent - 1] if parent else [] for parent in TREE_PARENTS]
    law = {}
    for (held, token), share in verdict_law(judged, ancestors, target.vocab).items():
        emitted = (*tree_text(held[-1] + 1 if held else 0), token)
        for rest, chance in target.law(3 - len(emitted), emitted):
            law[(*emitted, *rest)] = law.get((*emitted, *rest), 0.0) + share * chance
    return law


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_of_point_masses_leaves_the_targets_law(seed):
    target = random_model(seed, vocab=3, depth=3, temperature=0.8)
    assert total_variation(tree_law(tree_rule, target), dict(target.law(3))) < ACCURACY


def test_control_siblings_that_are_not_removed_are_biased():
    """A tree rule that tests each child against the whole row accepts the younger ones too rarely or draws elders."""

    def forgetful(p, tokens, parents, uniforms):
        row = 0
        path = [0]
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent == row and uniforms[node] < p[row][token]:
                row = node + 1
                path.append(row)
        return tree_rule_result(path, p[row], uniforms[-1])

    target = random_model(0, vocab=3, depth=3, temperature=0.8)
    assert total_variation(tree_law(forgetful, target), dict(target.law(3))) > 0.03


def tree_rule_result(path, row, uniform):
    """A verdict whose next token is drawn from a whole row."""
    return type("Verdict", (), {"path": path, "next_token": int(np.searchsorted(np.cumsum(row), uniform))})


def test_a_chain_is_a_tree():
    rng = np.random.default_rng(0)
    target = random_model(9, vocab=4, depth=3)
    ((drafts, _),) = drafts_of(target, None, 3)
    p = np.stack([target.probs(drafts[:i]) for i in range(4)])
    logits = np.stack([target.rows[drafts[:i]] for i in range(4)])[None]
    for uniforms in rng.random((200, 4)):
        inputs = {"logits": logits, "draft_ids": np.array([drafts]), "draft_lengths": np.array([3])}
        found = by_reference({**inputs, "uniforms": uniforms[None], **settings(1)}, "deterministic")
        verdict = tree_rule(p, drafts, (0, 1, 2), uniforms)
        assert (len(verdict.path) - 1, verdict.next_token) == (found["n_accepted"][0], found["next_token"][0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_twenty_thousand_draws_fit_plain_sampling(rule, temperature):
    """Chi-square of the first emitted token on 11 tokens, top-p 0.9, at a level of about one in ten thousand."""
    mode, _, kind = rule.partition(" ")
    n, vocab, k = 20_000, 11, 2
    rng = np.random.default_rng(7)
    row, draft_row = (2 * rng.standard_normal((2, vocab))).astype(np.float32)
    p = plain_distribution(row, temperature, top_p=np.float32(0.9))
    q = plain_distribution(draft_row)
    drafts = np.full((n, k), np.argsort(row)[-2]) if mode == "deterministic" else rng.choice(vocab, (n, k), p=q)
    ids = rng.permutation(vocab)
    inputs = {
        "logits": np.tile(row, (n, k + 1, 1)),
        "draft_ids": drafts.astype(np.int64),
        "draft_lengths": rng.integers(0, k + 1, n).astype(np.int32),
        "uniforms": rng.random((n, k + 1), dtype=np.float32),
        **settings(n, temperature, top_p=0.9),
        "q": np.tile((q[ids] if kind == "sparse" else q).astype(np.float32), (n, k, 1)),
    }
    if kind == "sparse":
        inputs["q_ids"] = np.tile(ids.astype(np.int32), (n, k, 1))
    found = by_body(inputs, mode)
    first = np.where(found["n_accepted"] > 0, drafts[:, 0], found["next_token"])
    counts = np.bincount(first, minlength=vocab)
    possible = p > 0
    assert counts[~possible].sum() == 0
    expected = n * p[possible]
    chi_square = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    # Wilson and Hilferty's cube: the 99.99 % point.
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3
