"""Launch records through the manifest and back."""

from __future__ import annotations

import json

import pytest
from launch_records import record

from dsc.bundle_schema.errors import BundleError
from dsc.bundle_schema.manifest import KernelEntry
from dsc.kernels.aot import CompiledKernel
from dsc.kernels.bundle_members import kernel_entry, launch_records


def test_a_record_survives_the_manifest():
    entry = kernel_entry(CompiledKernel(record(), b"code"))
    assert entry.member == "kernels/sm_90/k_small.cubin"
    read = KernelEntry.model_validate_json(entry.model_dump_json())
    assert launch_records([read]) == {entry.member: record()}
    assert json.loads(entry.model_dump_json())["metadata"]["minimum_driver"] == 12000


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_warps": "many"}, "num_warps"),
        ({"surprise": 1}, "surprise"),
        ({"arch": "sm_80"}, "its metadata is of k_small for sm_80"),
    ],
)
def test_wrong_metadata_is_refused_by_field(changes, reason):
    entry = kernel_entry(CompiledKernel(record(), b"code"))
    bad = entry.model_copy(update={"metadata": {**entry.metadata, **changes}})
    with pytest.raises(BundleError, match=reason):
        launch_records([bad])
