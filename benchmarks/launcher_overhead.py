"""Host time of one kernel launch through the ctypes launcher, on a driver that does nothing (needs gcc, no GPU)."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
sys.path.append(str(SUPPORT))

from launch_records import mock_image, record  # noqa: E402

from dsc.kernels.attention_table import attention_variants  # noqa: E402
from dsc.kernels.gpu_targets import architecture  # noqa: E402
from dsc.kernels.launch_record import KernelArg  # noqa: E402
from dsc.runtime.cuda_driver import CudaDriver  # noqa: E402


def main(repeats: int = 50, launches: int = 200) -> None:
    """Print the median and best of `repeats` means over `launches` calls."""
    variant = attention_variants(128, "float16", architecture("sm_90"))[0]
    args = tuple(KernelArg(name=name, type=kind) for name, kind in variant.signature)
    made = record(entry=variant.function, args=args, divisible_by_16=variant.divisible_by_16)
    values = [16 * (i + 1) if arg.is_pointer else 1 for i, arg in enumerate(args)]
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "libmockcuda.so")
        command = ["gcc", "-O2", "-DQUIET", "-shared", "-fPIC", "-o", library, str(SUPPORT / "mock_cuda.c")]
        subprocess.run(command, check=True)
        with CudaDriver(library=library) as driver:
            launch = driver.prepare(made, mock_image(made))
            means = []
            for _ in range(repeats):
                start = time.perf_counter()
                for _ in range(launches):
                    launch((8, 8, 4), 0, values)
                means.append((time.perf_counter() - start) / launches * 1e6)
    print(f"{len(args)} arguments: median {statistics.median(means):.2f} us, best {min(means):.2f} us a launch")


if __name__ == "__main__":
    main()
