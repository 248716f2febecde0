import numpy as np
import pytest
from pass_graphs import ops, run, text_model

from dsc.kernels.experts import reference
from dsc.passes.lower_experts import LowerExpertsPass
from dsc.passes.verify_graph import verify_graph

E, H, F, K = 6, 32, 16, 2


def weights(transposed, bias, seed=0):
    rng = np.random.default_rng(seed)
    up = (rng.standard_normal((E, 2 * F, H)) / 4).astype(np.float32)
    down = (rng.standard_normal((E, H, F)) / 3).astype(np.float32)
    found = {"up": up, "down": down}
    if transposed:
        found = {name: np.ascontiguousarray(a.swapaxes(1, 2)) for name, a in found.items()}
    if bias:
        found["up_bias"] = rng.standard_normal((E, 2 * F)).astype(np.float32)
        found["down_bias"] = rng.standard_normal((E, H)).astype(np.float32)
    return found


def build(attributes, given, router="w = Sigmoid(r)"):
    shapes = ", ".join(f"float[{', '.join(map(str, a.shape))}] {name}" for name, a in given.items())
    text = f"""agraph (float[T, {H}] x, int64[T, {K}] i, float[T, {K}] r, {shapes}) => (float[T, {H}] y)
    <float[T, {K}] w> {{ {router} y = ai.dspark.Experts<{attributes}>(x, i, w, {", ".join(given)}) }}"""
    return text_model(text, **given)


FORMS = [
    ('activation="silu", gated=1', {"activation": "silu", "gated": 1}),
    ('activation="silu", gated=1, interleaved=1', {"activation": "silu", "gated": 1, "interleaved": 1}),
    (
        'activation="swiglu_limited", gated=1, interleaved=1, alpha=1.702, limit=0.7',
        {"activation": "swiglu_limited", "gated": 1, "interleaved": 1, "alpha": 1.702, "limit": 0.7},
    ),
]


@pytest.mark.parametrize(("text", "attributes"), FORMS)
@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_the_operator_gives_what_the_contract_says(text, attributes, transposed, bias):
    given = weights(transposed, bias)
    model = build(f"{text}, transposed={transposed}", given)
    result = LowerExpertsPass()(model)
    verify_graph(model)
    assert result.fired == 1
    assert "Experts" not in ops(model)
    assert len(model.graph.initializers) == len(given) + 3
    rng = np.random.default_rng(1)
    for tokens in (1, 4, 12):
        feeds = {
            "x": rng.standard_normal((tokens, H)).astype(np.float32),
            "i": np.stack([rng.permutation(E)[:K] for _ in range(tokens)]),
            "r": 4 * rng.standard_normal((tokens, K)).astype(np.float32),
        }
        routed = {"hidden": feeds["x"], "indices": feeds["i"], "weights": 1 / (1 + np.exp(-feeds["r"]))}
        wanted = reference(routed | given, attributes | {"transposed": transposed})["y"]
        np.testing.assert_allclose(run(model, feeds)["y"], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("attributes", "router", "why"),
    [
        ('activation="gelu", gated=1', "w = Sigmoid(r)", "got gelu"),
        ('activation="silu", gated=0', "w = Sigmoid(r)", "with a gate"),
        ('activation="silu", gated=1', "w = Tanh(r)", "not plainly"),
        ('activation="silu", gated=1', "w = Identity(r)", "not plainly"),
    ],
)
def test_what_does_not_fit_stays_and_says_why(attributes, router, why):
    model = build(attributes, weights(0, False), router)
    result = LowerExpertsPass()(model)
    assert not result.modified
    assert why in str(result.skipped[0])
    assert "Experts" in ops(model)
