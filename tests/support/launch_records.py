"""Hand-made launch records for tests of selection and launching."""

from __future__ import annotations

import hashlib
from typing import Any

from dsc.kernels.launch_record import GridFactor, KernelArg, LaunchRecord

ARGS = (("x_ptr", "*fp16"), ("y_ptr", "*fp32"), ("n", "i32"), ("count", "i64"), ("scale", "fp32"))
SIZES = {"i32": 4, "u32": 4, "i64": 8, "u64": 8, "fp32": 4}


def record(**changes: Any) -> LaunchRecord:
    """A launch record for sm_90 with the given fields changed."""
    fields: dict[str, Any] = {
        "kernel": "k",
        "variant": "k_small",
        "arch": "sm_90",
        "image": "cubin",
        "entry": "k_entry",
        "args": tuple(KernelArg(name=name, type=kind) for name, kind in ARGS),
        "constants": {},
        "divisible_by_16": ("x_ptr",),
        "grid": ((GridFactor(axis="rows", per=16),), (GridFactor(axis="batch"), GridFactor(axis="heads")), ()),
        "equals": {"dtype": "float16"},
        "at_most": {"rows": 32},
        "num_warps": 4,
        "num_ctas": 1,
        "num_stages": 2,
        "warp_size": 32,
        "shared": 1024,
        "tmem_size": 0,
        "global_scratch_size": 0,
        "global_scratch_align": 1,
        "profile_scratch_size": 0,
        "profile_scratch_align": 1,
        "cooperative": False,
        "programmatic_launch": False,
        "resources": None,
        "opcodes": {},
        "sha256": "",
        "triton_version": "3.8.0",
        "assembler_version": "12.9.86",
        "ptx_version": "8.8",
        "minimum_driver": 12000,
        "line_info": False,
        "fp_fusion": True,
        **changes,
    }
    fields["sha256"] = hashlib.sha256(mock_image_of(fields["entry"], fields["args"])).hexdigest()
    return LaunchRecord(**fields)


def mock_image_of(entry: str, args: tuple[KernelArg, ...]) -> bytes:
    """The image that the mock driver loads: the entry and the size of every parameter, the two hidden ones too."""
    sizes = [8 if arg.is_pointer else SIZES[arg.type] for arg in args] + [8, 8]
    return f"{entry} {' '.join(map(str, sizes))}".encode()


def mock_image(launch_record: LaunchRecord) -> bytes:
    """The mock driver's image of a record."""
    return mock_image_of(launch_record.entry, launch_record.args)
