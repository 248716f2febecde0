"""The planner, judged by the independent checker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsc.bundle_schema.errors import PlanError
from dsc.bundle_schema.kv_plan import check_plan
from dsc.bundle_schema.model_info import KvLayer, ModelInfo
from dsc.bundle_schema.tensors import DType
from dsc.compiler.plan_kv import kv_nbytes_per_token, longest_length, plan_kv


def model_info(
    layers: list[tuple[int, int]], max_length: int = 4096, dtype: DType = DType.FLOAT32, windows: tuple[int, ...] = ()
) -> ModelInfo:
    """Layers of KV heads and head sizes; the first ones have windows, and rings."""
    needs = [KvLayer(n_kv_heads=heads, head_dim=dim) for heads, dim in layers]
    for index, window in enumerate(windows[: len(needs)]):
        needs[index] = needs[index].model_copy(update={"window": window, "ring": True})
    return ModelInfo(
        architecture="ToyForCausalLM",
        model_type="toy",
        vocab_size=32,
        hidden_size=16,
        n_layers=len(layers),
        n_heads=4,
        max_length=max_length,
        n_parameters=1,
        kv_layers=tuple(needs),
        kv_dtype=dtype,
    )


LAYERS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 300)), min_size=1, max_size=6)


WINDOWS = st.lists(st.integers(1, 2000), max_size=4).map(tuple)


@given(LAYERS, LAYERS | st.none(), WINDOWS, st.integers(1, 4096), st.integers(1, 17), st.integers(1, 5))
def test_every_plan_passes_the_independent_checker(target, draft, windows, max_length, slack, n_slots):
    target_info = model_info(target, windows=windows)
    draft_info = model_info(draft, dtype=DType.FLOAT16, windows=windows[::-1]) if draft else None
    plan = plan_kv(target_info, draft_info, max_length, slack, n_slots)
    check_plan(plan, target_info, draft_info)
    assert {slot.owner for slot in plan.slots} == {"target"} | ({"draft"} if draft else set())
    for slot in plan.slots:
        full = -(-(max_length + slack) // 128) * 128
        assert slot.rows == full if slot.window is None else slot.window + 128 <= slot.rows < full


@given(LAYERS, WINDOWS, st.integers(0, 1 << 24), st.integers(1, 9))
def test_longest_length_is_the_last_that_fits(layers, windows, memory, slack):
    info = model_info(layers, max_length=3000, windows=windows)
    longest = longest_length(info, None, memory, slack)
    if longest:
        assert plan_kv(info, None, longest, slack).total_nbytes <= memory
    if longest < info.max_length:
        assert plan_kv(info, None, longest + 1, slack).total_nbytes > memory


@pytest.mark.parametrize(
    ("max_length", "rows"), [(32768, [640, 32896]), (700, [640, 768]), (600, [640, 640]), (64, [128, 128])]
)
def test_a_window_has_a_ring_where_that_takes_fewer_rows(max_length, rows):
    plan = plan_kv(model_info([(1, 8), (1, 8)], 32768, windows=(512,)), None, max_length, 17)
    assert [slot.rows for slot in plan.slots if slot.role == "k"] == rows
    assert [slot.window for slot in plan.slots if slot.role == "k"] == [512 if rows[0] < rows[1] else None, None]


def test_a_window_of_a_graph_without_rings_keeps_all_rows():
    info = model_info([(1, 8)], 4096, windows=(512,)).with_pools(DType.FLOAT32, frozenset())
    plan = plan_kv(info, None, 4096, 17)
    assert {slot.rows for slot in plan.slots} == {4224}
    ring = [slot.model_copy(update={"window": 512}) for slot in plan.slots]
    with pytest.raises(PlanError, match="the graph of its layer has no rings"):
        check_plan(plan.model_copy(update={"slots": tuple(ring)}), info)


def test_a_length_past_the_model_is_refused_with_both_numbers():
    with pytest.raises(PlanError, match=r"at most 64 positions, got 65"):
        plan_kv(model_info([(1, 8)], max_length=64), None, 65, 5)


def test_bytes_per_token_count_keys_and_values():
    assert kv_nbytes_per_token(model_info([(3, 64)] * 30)) == 30 * 2 * 3 * 64 * 4
