"""Compile a model of 1.5 billion random parameters and print the peak memory against its float32 weights; then time
what only looks at a bundle of that size.

Usage: ``python benchmarks/large_model.py FOLDER [PRECISION]``. The checkpoint (3 GB, bfloat16) and the bundle go to
FOLDER; a checkpoint that is there already is used again.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from dsc.compiler.compile import compile_bundle
from dsc.compiler.request import build_request

CONFIG = {
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def make_checkpoint(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def main(folder: Path, precision: str) -> None:
    source = folder / "random-1.5b"
    if not (source / "config.json").exists():
        # A process of its own: what it takes must not count.
        code = "import sys; sys.path.insert(0, sys.argv[1]); import large_model, pathlib; " + (
            "large_model.make_checkpoint(pathlib.Path(sys.argv[2]))"
        )
        subprocess.run([sys.executable, "-P", "-c", code, str(Path(__file__).parent), str(source)], check=True)
    options = {
        "target": source,
        "output": folder / f"random-1.5b-{precision}.dsmodel",
        "weights": {"precision": precision},
        "max_length": 512,
        # In four bits random weights agree with their floats less than a model must.
        "gate": {"n_prompts": 1, "n_tokens": 8, "n_draws": 0, "strict": False},
        "force": True,
    }
    report = compile_bundle(build_request(options), on_stage=lambda name, index, total: print(name, flush=True))
    report.print(time_passes=False, explain=False)
    from dsc.bundle_schema.container import open_bundle

    with open_bundle(report.output) as bundle:
        fp32_nbytes = 4 * bundle.manifest.target.info.n_parameters
    peak = max(stage.peak_rss_nbytes for stage in report.stages)
    print(f"float32 weights {fp32_nbytes / 2**30:.2f} GiB, peak {peak / 2**30:.2f} GiB, ratio {peak / fp32_nbytes:.2f}")
    print(f"bundle {report.output.stat().st_size / 1e9:.2f} GB")
    for command in (["--help"], ["inspect", str(report.output)], ["inspect", str(report.output), "--json"]):
        print(f"dsc {' '.join(command[:1] + command[2:])}: {median_seconds(command):.2f} s")


def median_seconds(command: list[str]) -> float:
    """Of five runs of `dsc`."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([Path(sys.executable).with_name("dsc"), *command], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "int4")
