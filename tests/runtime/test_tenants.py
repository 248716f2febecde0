import numpy as np
import pytest
from scripted_lm import greedy_reference
from toy_bundle import toy_bundle

from dsc.bundle_schema.dflash_config import DflashConfig, Proposer, TenantCap, Tenants
from dsc.runtime import load
from dsc.runtime.speculator import speculation_options
from dsc.runtime.tenants import cap_request, tenant_cap

TABLE = np.random.default_rng(11).normal(size=(13, 13)).astype(np.float32)
PROMPT = [3, 1, 4]
SMALL = TenantCap(max_window=2, max_tokens=7)
CONFIG = DflashConfig(
    tenants=Tenants(default=TenantCap(max_window=5), caps={"small": SMALL}), proposers={"self": Proposer()}
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "toy.dsmodel"
    return load(toy_bundle(path, TABLE, TABLE, draft_kind="self", config=CONFIG), verify="never")


def test_a_tenant_without_a_cap_of_its_own_has_the_default():
    assert tenant_cap(CONFIG, "small") == SMALL
    assert tenant_cap(CONFIG, "other") == TenantCap(max_window=5)


@pytest.mark.parametrize(
    ("asked", "window", "widest"),
    [({}, None, 2), ({"window": 8}, 2, 2), ({"window": 1}, 1, 2), ({"max_window": 1}, None, 1)],
)
def test_windows_are_cut_to_the_cap_and_smaller_ones_stay(model, asked, window, widest):
    request = model.stream(PROMPT, 20, speculation=asked).request
    capped = cap_request(request, SMALL)
    assert (capped.speculation.window, capped.speculation.max_window) == (window, widest)
    assert capped.max_tokens == len(PROMPT) + 7


def test_a_plain_request_stays_plain(model):
    request = model.stream(PROMPT, 5, speculation="off").request
    assert cap_request(request, SMALL).speculation is None
    assert cap_request(request, SMALL).max_tokens == len(PROMPT) + 5


@pytest.mark.parametrize("policy", ["fixed", "calibrated", "rules"])
def test_the_widest_window_of_a_request_holds_under_every_policy(model, policy):
    model.update_config({"policy": policy})
    options = speculation_options({"max_window": 2, "fallback": False})
    result = model.generate(PROMPT, 20, speculation=options)
    assert list(result.ids) == greedy_reference(TABLE, PROMPT, 20)
    assert max(result.stats.windows) <= 2
    assert result.stats.proposed > 0
