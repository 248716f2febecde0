"""The same input gives the same bytes, whoever writes it, wherever and whenever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bundle_samples import write_sample

SUPPORT = Path(__file__).parent.parent / "support"
WRITE = """
import os, sys
from pathlib import Path
from bundle_samples import write_sample
os.umask(int(sys.argv[2], 8))
write_sample(Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("name", "umask", "environment"),
    [
        ("a.dsmodel", "022", {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "0", "HOME": "/"}),
        ("folder/other name.dsmodel", "077", {"TZ": "Asia/Kathmandu", "LC_ALL": "tr_TR.UTF-8", "PYTHONHASHSEED": "7"}),
        ("ü/b.dsmodel", "000", {"SOURCE_DATE_EPOCH": "1", "LC_ALL": "de_DE", "PYTHONHASHSEED": "random", "USER": "x"}),
    ],
)
def test_bytes_do_not_depend_on_the_surroundings(tmp_path: Path, name: str, umask: str, environment: dict[str, str]):
    reference, path = tmp_path / "reference.dsmodel", tmp_path / name
    write_sample(reference)
    path.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-c", WRITE, os.path.basename(name), umask]
    env = environment | {"PYTHONPATH": str(SUPPORT), "PYTHONUTF8": "1"}
    subprocess.run(command, check=True, cwd=path.parent, env=env)
    assert path.read_bytes() == reference.read_bytes()
