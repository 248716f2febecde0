"""Which measured costs hold where a bundle runs, and what is said of them."""

import pytest

from dsc.bundle_schema.dflash_config import CostCurve, DflashConfig
from dsc.kernels.native import NativeLibrary
from dsc.runtime.costs import MEASURED_HERE, costs_for, device_fingerprint
from dsc.runtime.host import SessionSettings

SETTINGS = SessionSettings("cpu", 2, "", NativeLibrary(None, "none is needed"))
HERE = device_fingerprint(SETTINGS)


def config(*devices: str) -> DflashConfig:
    """Row r costs 1 + i r / 10 of the first on the i-th device."""
    return DflashConfig(
        costs=tuple(
            CostCurve(device=device, verify_ms=tuple(1 + index * row / 10 for row in range(16)))
            for index, device in enumerate(devices, 1)
        )
    )


@pytest.mark.parametrize(
    ("devices", "source", "four_rows"),
    [
        (("another", HERE), MEASURED_HERE, 1.6),
        (("another", "a third"), "measured on another", 1.3),
        ((), "assumed", 1.6),
    ],
)
def test_costs_of_this_device_are_preferred_to_another_s_and_those_to_assumed_ones(devices, source, four_rows):
    costs, said = costs_for(config(*devices), SETTINGS, "ngram", context=64)
    assert said == source
    ms = costs.verify_ms()
    assert ms[3] / ms[0] == pytest.approx(four_rows)
