"""The bundle between emission and sealing: a locked file beside its final place, gone when anything fails."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dsc.bundle_schema.certificate import CERTIFICATE_NAME, dump_certificate
from dsc.bundle_schema.container import remove_leftovers, rewrite_members, temporary_path
from dsc.bundle_schema.dflash_config import DFLASH_CONFIG_NAME, Proposer, dump_config
from dsc.compiler.card import CARD_NAME, write_card
from dsc.runtime.schedule_setup import LOOKUPS

if TYPE_CHECKING:
    from dsc.bundle_schema.dflash_config import DflashConfig, ProposerKind
    from dsc.compiler.emit import BundleContents
    from dsc.compiler.gate import GateResult


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A path in the output's folder for a bundle that is not sealed yet.

    It is removed at the end of the block. If the process is killed before, the next writer of the same output finds it
    unlocked and removes it; `held` keeps it from a writer that comes while this one lives.
    """
    output = Path(os.path.realpath(output))
    remove_leftovers(output)
    path = temporary_path(output)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def held(staging: Path) -> Iterator[None]:
    """Lock the staged bundle: it is measured for longer than its writing took."""
    with staging.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def seal(staging: Path, output: Path, contents: BundleContents, result: GateResult, with_costs: bool) -> None:
    """Put what the gate measured into the bundle and move it to its place in one step.

    Args:
        with_costs: store the measured times, which differ from run to run, and schedule by them.
    """
    config = _measured(contents.config, contents.draft_kind, result) if with_costs else contents.config
    card = write_card(contents, result.certificate)
    changes = {
        CERTIFICATE_NAME: dump_certificate(result.certificate),
        DFLASH_CONFIG_NAME: dump_config(config),
        CARD_NAME: card.encode(),
    }
    rewrite_members(staging, changes, output)


def _measured(config: DflashConfig, draft: ProposerKind, result: GateResult) -> DflashConfig:
    """The schedule by what the gate measured: costs, windows as wide as those, and how often the draft was right."""
    checks = [check for check in result.certificate.greedy if check.proposer == draft]
    n_judged, n_held = sum(check.n_judged for check in checks), sum(check.n_held for check in checks)
    proposers = dict(config.proposers)
    if n_judged and draft not in LOOKUPS:
        row = proposers.get(draft, Proposer())
        proposers[draft] = row.model_copy(update={"acceptance": round(n_held / n_judged, 4)})
    widest = max((len(curve.verify_ms) - 1 for curve in result.costs), default=0)
    windows = config.windows.model_copy(update={"max": max(config.windows.max, widest)})
    changes = {"costs": result.costs, "policy": "calibrated", "proposers": proposers, "windows": windows}
    return config.model_copy(update=changes)
