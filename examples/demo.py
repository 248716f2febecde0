"""Compile a real model, look into the bundle, and generate with speculation off and on.

Usage: ``python examples/demo.py MODEL.gguf [OUTPUT_FOLDER]``. A bundle that is there already is used again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from dsc.compiler.compile import compile_bundle
from dsc.compiler.inspect import inspect_bundle
from dsc.compiler.request import build_request
from dsc.runtime import GenerationResult, SpeculativeModel, load

PROMPTS = (
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog near the river bank.",
    "Name the capital city of France.",
)
ROUNDS = 3
MAX_NEW_TOKENS = 96


def main(source: Path, folder: Path) -> None:
    bundle = folder / f"{source.stem}.dsmodel"
    if not bundle.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"compiling {source.name} (a minute or two)")
        request = build_request({"target": source, "output": bundle, "draft": {"kind": "ngram"}})
        report = compile_bundle(request, on_stage=lambda name, index, total: print(f"  {index + 1}/{total} {name}"))
        report.print(time_passes=False, explain=False)
    show(bundle)
    model = load(bundle)
    for prompt in PROMPTS:
        compare(model, prompt)


def show(bundle: Path) -> None:
    """The parts of `dsc inspect` that say most."""
    report = inspect_bundle(bundle)
    print(f"\n{bundle.name}: {report['identity']['size']}, certificate: {report['identity']['verdict']}")
    target = report["target"]
    print(f"  {target['architecture']}, {target['parameters']} parameters, weights {target['weights']}")
    print(f"  KV cache: {report['kv_plan cpu']['bytes per token']} bytes a token")


def compare(model: SpeculativeModel, prompt: str) -> None:
    """Generate with speculation off and on, in turn, and compare speed and output."""
    plain: list[float] = []
    fast: list[float] = []
    results: list[GenerationResult] = []
    for _ in range(ROUNDS):
        for speeds, speculation in ((plain, "off"), (fast, "auto")):
            result = model.generate(
                [{"role": "user", "content": prompt}], max_new_tokens=MAX_NEW_TOKENS, speculation=speculation
            )
            speeds.append(result.stats.tokens_per_second)
            results.append(result)
    same = len({result.ids for result in results}) == 1
    print(f"\n> {prompt}\n{results[-1].text.strip()}")
    print(
        f"  speculation off {median(plain):.1f} tokens/s, on {median(fast):.1f} tokens/s "
        f"({median(fast) / median(plain):.2f} x), output identical: {'yes' if same else 'NO'}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path())
