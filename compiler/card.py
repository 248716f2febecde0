"""`card.md`: the page about a bundle that a person reads first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsc.bundle_schema.certificate import Certificate
    from dsc.compiler.emit import BundleContents

CARD_NAME = "card.md"


def write_card(contents: BundleContents, certificate: Certificate) -> str:
    """Markdown: what the bundle is, where it came from, what it needs, what was measured."""
    info, name = contents.target.info, contents.name
    draft = contents.draft_kind
    lines = [
        f"# {name}",
        "",
        f"{info.architecture}, {info.n_parameters / 1e6:.1f} M parameters, weights {info.quantization}, draft {draft}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| source of {part} | {text} |" for part, text in contents.sources.items()),
        *(f"| licence of {part} | {text} |" for part, text in contents.licences.items()),
        f"| longest sequence | {contents.plans['cpu'].max_length} |",
        *(
            f"| KV memory on {backend} | {plan.total_nbytes} bytes for {plan.n_slots} sequences |"
            for backend, plan in contents.plans.items()
        ),
        *_gpu_lines(contents),
        f"| certificate | {certificate.verdict} on {certificate.device} |",
        f"| greedy speculative against plain | {_greedy(certificate)} |",
        "",
        "```python",
        "import dsc.runtime",
        f'model = dsc.runtime.load("{name}.dsmodel")',
        'print(model.generate([{"role": "user", "content": "Hello"}], max_new_tokens=64).text)',
        "```",
        "",
    ]
    return "\n".join(lines)


def _gpu_lines(contents: BundleContents) -> list[str]:
    archs = dict.fromkeys(kernel.record.arch for kernel in contents.gpu.kernels)
    left_out = [f"| {kernels} | left out: {why} |" for kernels, why in contents.gpu.left_out.items()]
    return [f"| GPU kernels (compiled, not run) | {', '.join(archs)} |", *left_out] if archs else left_out


def _greedy(certificate: Certificate) -> str:
    checks = (
        f"{check.proposer} with window {check.window}: "
        + (f"{len(check.mismatches)} of {check.n_prompts} differ" if check.mismatches else "identical")
        for check in certificate.greedy
    )
    return "; ".join(checks) or "not measured"
