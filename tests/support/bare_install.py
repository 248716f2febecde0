"""Install the built wheel into a bare environment and run a bundle there, without torch or onnx.

Usage: ``python bare_install.py DIST_FOLDER``. Exits non-zero with the failing command's output.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FORBIDDEN = ("torch", "transformers", "onnx", "triton")
BUNDLE = REPOSITORY / "build" / "bare" / "bare.dsmodel"

USE = """
import sys
from dsc.runtime import load
model = load(sys.argv[1])
plain = model.generate([1, 2, 3, 1, 2, 3], max_new_tokens=8, speculation="off")
fast = model.generate([1, 2, 3, 1, 2, 3], max_new_tokens=8)
assert plain.ids == fast.ids and len(plain.ids) > 0, (plain.ids, fast.ids)
print("generated", plain.ids)
"""

COMPILE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tiny_models import tiny_llama_dir
from dsc.compiler.compile import compile_bundle
from dsc.compiler.request import build_request
out = Path(sys.argv[2])
out.parent.mkdir(parents=True, exist_ok=True)
source = tiny_llama_dir(out.parent / "tiny")
compile_bundle(build_request({"target": source, "output": out, "force": True}))
"""


def run(*command: str | Path, cwd: str | None = None) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(dist: str) -> None:
    wheels = sorted(Path(dist).glob("dsc_toolchain-*.whl"))
    if len(wheels) != 1:
        sys.exit(f"{dist}: exactly one wheel is required, got {[wheel.name for wheel in wheels]}")
    run(sys.executable, "-c", COMPILE, REPOSITORY / "tests" / "support", BUNDLE)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        dsc = Path(folder) / "bin" / "dsc"
        constraints = REPOSITORY / "constraints.txt"
        run(python, "-m", "pip", "install", "--quiet", "-c", constraints, f"{wheels[0]}[cpu]")
        for name in FORBIDDEN:
            run(python, "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec({name!r}) is not None)")
        print(run(python, "-c", USE, BUNDLE, cwd=folder), end="")
        run(dsc, "--help")
        run(dsc, "doctor")
        run(dsc, "check", BUNDLE)
        run(dsc, "inspect", BUNDLE)
        print(run(dsc, "run", BUNDLE, "--raw", "--prompt", "the cat", "-n", "4", "--no-stats"), end="")
    print(f"{wheels[0].name}: installs and runs without {', '.join(FORBIDDEN)}")


if __name__ == "__main__":
    main(sys.argv[1])
