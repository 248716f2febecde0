"""Where a plain decoding step goes, operator by operator, by onnxruntime's own profile of the target's graph.

Profiling adds about a microsecond to each node, so the sum is more than a step takes without it.

    python benchmarks/operators.py bundle.dsmodel [--tokens 64]
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections import Counter
from pathlib import Path

import onnxruntime as ort
from prompts import by_category
from report import markdown_table

from dsc.runtime import load


class ProfiledOptions(ort.SessionOptions):
    """Makes every session write a profile into `folder`."""

    folder = ""

    def __init__(self) -> None:
        super().__init__()
        self.enable_profiling = True
        self.profile_file_prefix = f"{self.folder}/step"


def profiled_decode(bundle: Path, n_tokens: int, folder: str) -> None:
    """Decode plainly; the sessions' profiles are complete when they are gone."""
    ProfiledOptions.folder = folder
    ort.SessionOptions = ProfiledOptions
    model = load(bundle, verify="never")
    ids = model.encode([{"role": "user", "content": by_category()["chat"][0].text}])
    model.generate(ids, n_tokens, ignore_eos=True, speculation="off")
    del model
    gc.collect()


def operator_times(folder: str) -> tuple[Counter[str], Counter[str], int]:
    """Milliseconds and nodes by operator, and the number of forwards, of the session that ran most."""
    best: tuple[Counter[str], Counter[str], int] = (Counter(), Counter(), 0)
    for path in Path(folder).iterdir():
        spent: Counter[str] = Counter()
        nodes: Counter[str] = Counter()
        runs = 0
        for event in json.loads(path.read_text(encoding="utf-8")):
            runs += event["name"] == "model_run"
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                spent[event["args"]["op_name"]] += event["dur"] / 1e3
                nodes[event["args"]["op_name"]] += 1
        if runs > best[2]:
            best = spent, nodes, runs
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        profiled_decode(given.bundle, given.tokens, folder)
        spent, nodes, runs = operator_times(folder)
    total = sum(spent.values())
    rows = [(op, f"{nodes[op] / runs:.0f}", f"{ms / runs:.2f}", f"{ms / total:.0%}") for op, ms in spent.most_common(5)]
    rows.append(("all", f"{sum(nodes.values()) / runs:.0f}", f"{total / runs:.2f}", "100%"))
    print(markdown_table(("operator", "nodes", "ms a step", "share"), rows))


if __name__ == "__main__":
    main()
