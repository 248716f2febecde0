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


def model_info(layers: list[tuple[int, int]], max_length: int = 4096, dtype: DType = DType.FLOAT32) -> ModelInfo:
    return ModelInfo(
        architecture="ToyForCausalLM",
        model_type="toy",
        vocab_size=32,
        hidden_size=16,
        n_layers=len(layers),
        n_heads=4,
        max_length=max_length,
        n_parameters=1,
        kv_layers=tuple(KvLayer(n_kv_heads=heads, head_dim=dim) for heads, dim in layers),
        kv_dtype=dtype,
    )


LAYERS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 300)), min_size=1, max_size=6)


@given(LAYERS, LAYERS | st.none(), st.integers(1, 4096), st.integers(1, 17), st.integers(1, 5))
def test_every_plan_passes_the_independent_checker(target, draft, max_length, slack, n_slots):
    target_info = model_info(target)
    draft_info = model_info(draft, dtype=DType.FLOAT16) if draft else None
    plan = plan_kv(target_info, draft_info, max_length, slack, n_slots)
    check_plan(plan, target_info, draft_info)
    assert {slot.owner for slot in plan.slots} == {"target"} | ({"draft"} if draft else set())
    assert plan.slots[0].rows >= max_length + slack


@given(LAYERS, st.integers(0, 1 << 24), st.integers(1, 9))
def test_longest_length_is_the_last_that_fits(layers, memory, slack):
    info = model_info(layers, max_length=3000)
    longest = longest_length(info, None, memory, slack)
    if longest:
        assert plan_kv(info, None, longest, slack).total_nbytes <= memory
    if longest < info.max_length:
        assert plan_kv(info, None, longest + 1, slack).total_nbytes > memory


def test_a_length_past_the_model_is_refused_with_both_numbers():
    with pytest.raises(PlanError, match=r"at most 64 positions, got 65"):
        plan_kv(model_info([(1, 8)], max_length=64), None, 65, 5)


def test_bytes_per_token_count_keys_and_values():
    assert kv_nbytes_per_token(model_info([(3, 64)] * 30)) == 30 * 2 * 3 * 64 * 4
