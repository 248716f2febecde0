"""Export time by depth: random decoders that differ in their number of layers alone, in turn, medians.

    python benchmarks/export_depth.py [--layers 4,16,64] [--rounds 5]

Only distinct layers are traced, so the time should hardly grow.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from dsc.compiler.export_hf import export_hf

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_checkpoint(folder: Path, layers: int) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=layers, **SIZES)).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="4,16,64")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    depths = [int(layers) for layers in options.layers.split(",")]
    times: dict[int, list[float]] = {layers: [] for layers in depths}
    with tempfile.TemporaryDirectory() as folder:
        sources = {layers: make_checkpoint(Path(folder) / str(layers), layers) for layers in depths}
        export_hf(sources[depths[0]])  # what comes first imports the libraries
        for _ in range(options.rounds):
            for layers, source in sources.items():
                start = perf_counter()
                export_hf(source)
                times[layers].append(perf_counter() - start)
    for layers, spent in times.items():
        print(f"{layers:4} layers{median(spent):8.2f} s")


if __name__ == "__main__":
    main()
