"""`card.md`: the page about a bundle that a person reads first."""

from __future__ import annotations

from dsc.bundle_schema.certificate import Certificate
from dsc.bundle_schema.kv_plan import KvPlan
from dsc.bundle_schema.model_info import ModelInfo


def write_card(
    name: str,
    info: ModelInfo,
    draft: str,
    plan: KvPlan,
    certificate: Certificate,
    sources: dict[str, str],
    licences: dict[str, str],
) -> str:
    """Markdown: what the bundle is, where it came from, what it needs, what was measured."""
    greedy = (
        "; ".join(
            f"{check.proposer} with window {check.window}: "
            + (f"{len(check.mismatches)} of {check.n_prompts} differ" if check.mismatches else "identical")
            for check in certificate.greedy
        )
        or "not measured"
    )
    lines = [
        f"# {name}",
        "",
        f"{info.architecture}, {info.n_parameters / 1e6:.1f} M parameters, weights {info.quantization}, draft {draft}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| source of {part} | {text} |" for part, text in sources.items()),
        *(f"| licence of {part} | {text} |" for part, text in licences.items()),
        f"| longest sequence | {plan.max_length} |",
        f"| KV memory | {plan.total_nbytes} bytes for {plan.n_slots} sequences |",
        f"| certificate | {certificate.verdict} on {certificate.device} |",
        f"| greedy speculative against plain | {greedy} |",
        "",
        "```python",
        "import dsc.runtime",
        f'model = dsc.runtime.load("{name}.dsmodel")',
        'print(model.generate([{"role": "user", "content": "Hello"}], max_new_tokens=64).text)',
        "```",
        "",
    ]
    return "\n".join(lines)
