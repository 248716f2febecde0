import numpy as np
import pytest
from toy_bundle import toy_bundle

from dsc.bundle_schema.dflash_config import CostCurve, DflashConfig, Proposer, ResourceProfile, Windows
from dsc.runtime import load
from dsc.runtime.resources import DeviceFacts, apply_profile, choose_profile, describe_profile

TABLE = np.random.default_rng(11).normal(size=(13, 13)).astype(np.float32)
GIB = 2**30


def cuda(gib: float | None) -> DeviceFacts:
    return DeviceFacts("cuda", "GPU", None if gib is None else int(gib * GIB), 16)


@pytest.mark.parametrize(
    ("gib", "name", "window"),
    [(8, None, 5), (23.5, "24 GB", 4), (40, "40 GB", 6), (79.1, "80 GB", 7), (141, "80 GB", 7), (None, None, 5)],
)
def test_the_largest_profile_that_fits_sets_the_first_window_within_the_range(gib, name, window):
    config = DflashConfig(windows=Windows(default=5, min=2, max=7))
    profile = choose_profile(config, cuda(gib))
    assert (profile.name if profile else None) == name
    assert apply_profile(config, profile).windows == Windows(default=window, min=2, max=7)


def test_profiles_of_another_provider_or_more_cores_do_not_fit():
    rows = (
        ResourceProfile(name="gpu", min_memory_gib=0, window=8),
        ResourceProfile(name="many", provider="cpu", min_memory_gib=0, min_cores=8, window=6),
        ResourceProfile(name="few", provider="cpu", min_memory_gib=0, window=3),
    )
    config = DflashConfig(profiles=rows)
    for cores, name in ((4, "few"), (8, "many")):
        assert choose_profile(config, DeviceFacts("cpu", "CPU", GIB, cores)).name == name


def test_the_cpu_takes_its_windows_from_measured_costs():
    facts = DeviceFacts("cpu", "CPU", 8 * GIB, 2)
    assert choose_profile(DflashConfig(), facts) is None
    curve = CostCurve(device="CPU", verify_ms=(1.0,) * 16)
    text = describe_profile(DflashConfig(costs=(curve,)), None, facts)
    assert text == "no profile for CPU, 8.0 GiB, 2 cores: windows from measured costs"


def test_a_profile_acts_at_load_and_is_reported(tmp_path):
    profile = ResourceProfile(name="small", provider="cpu", min_memory_gib=0.001, window=3, draft=False)
    config = DflashConfig(proposers={"self": Proposer(), "ngram": Proposer()}, profiles=(profile,))
    path = toy_bundle(tmp_path / "toy.dsmodel", TABLE, TABLE, draft_kind="self", config=config)
    model = load(path, verify="never")
    assert model.config.windows.default == 3
    assert model.proposers == ("ngram",)
    stats = model.generate([1, 2, 3], 5).stats
    assert stats.profile.startswith("small for ")
    assert stats.profile.endswith("first window 3, no draft model")
    assert stats.speculation_reason == "the profile 'small' leaves the draft model out"
    model.update_config({"windows.default": 5})
    assert model.config.windows.default == 5
