import numpy as np
import pytest
from scripted_lm import greedy_reference
from toy_bundle import toy_bundle

from dsc.bundle_schema.dflash_config import DflashConfig, MemoryPressure, Proposer, Windows
from dsc.runtime import load
from dsc.runtime.memory_pressure import PressureWatch
from dsc.runtime.schedule_config import LiveConfig

VOCAB = 13
TABLE = np.random.default_rng(11).normal(size=(VOCAB, VOCAB)).astype(np.float32)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 3


class Memory:
    """A machine whose memory and time are set by the test."""

    def __init__(self) -> None:
        self.share: float | None = 0.5
        self.now = 0.0

    def watch(self) -> PressureWatch:
        return PressureWatch("self", lambda: self.share, lambda: self.now)


def test_the_rule_comes_after_its_time_and_goes_at_once():
    memory = Memory()
    watch, rule = memory.watch(), MemoryPressure(threshold=0.85, seconds=300)
    seen = []
    for now, share in [(0, 0.9), (200, 0.9), (250, 0.8), (260, 0.9), (559, 0.9), (560, 0.9), (700, 0.99), (701, 0.85)]:
        memory.now, memory.share = now, share
        seen.append((watch.changed(rule), watch.pressed))
    quiet = (False, False)
    assert seen == [quiet, quiet, quiet, quiet, quiet, (True, True), (False, True), (True, False)]


def test_memory_that_cannot_be_measured_is_no_pressure():
    memory = Memory()
    watch = memory.watch()
    memory.share = None
    memory.now = 1e6
    assert not watch.changed(MemoryPressure(seconds=0))


def test_it_looks_once_a_second():
    looks = []
    memory = Memory()
    watch = PressureWatch("none", lambda: looks.append(memory.now) or 0.5, lambda: memory.now)
    for memory.now in np.arange(0, 3, 0.1):
        watch.changed(MemoryPressure())
    assert len(looks) == 3


def test_the_configuration_is_capped_and_comes_back_with_what_was_changed_meanwhile():
    memory = Memory()
    config = DflashConfig(
        windows=Windows(default=8, min=7, max=16), pressure=MemoryPressure(seconds=0), proposers={"self": Proposer()}
    )
    live = LiveConfig(config, watch=memory.watch())
    memory.share, memory.now = 0.9, 1.0
    live.poll()
    assert live.current.windows == Windows(default=6, min=6, max=6)
    assert not live.current.proposers["self"].enabled
    assert live.current.cache.prefix_max_nbytes == 0
    assert live.updates[-1].startswith("taken, memory pressure: windows.min, windows.default")
    live.update({"windows.max": 12, "windows.default": 12})
    assert live.current.windows.max == 6
    memory.share, memory.now = 0.5, 2.0
    live.poll()
    assert live.current == live.configured
    assert live.current.windows == Windows(default=12, min=7, max=12)
    assert live.updates[-1] == "taken, memory pressure: it has ended"


@pytest.fixture
def pressed(tmp_path):
    """A model and the memory of its machine."""
    config = DflashConfig(pressure=MemoryPressure(seconds=0), proposers={"self": Proposer(), "ngram": Proposer()})
    path = toy_bundle(tmp_path / "toy.dsmodel", TABLE, TABLE, draft_kind="self", max_length=96, config=config)
    model, memory = load(path, verify="never"), Memory()
    model.scheduler.live._watch = memory.watch()
    return model, memory


def test_no_request_fails_and_no_output_changes(pressed):
    model, memory = pressed
    named = {"proposer": "self", "window": 4, "fallback": False}
    plain = greedy_reference(TABLE, PROMPT, 20)
    model.generate(PROMPT, 20, reuse_cache=True)
    model.generate(PROMPT[::-1], 20, reuse_cache=True)
    for share in (0.5, 0.95, 0.5):
        memory.share = share
        memory.now += 1
        for speculation in ("auto", named, "off"):
            result = model.generate(PROMPT, 20, speculation=speculation, reuse_cache=True)
            assert list(result.ids) == plain
            assert result.stats.memory_pressure == (share > 0.85)
            if speculation == named:
                assert (result.stats.accepted == 0) == (share > 0.85)
                assert (result.stats.fallbacks["disabled"] > 0) == (share > 0.85)
        model.generate(PROMPT[::-1], 3, reuse_cache=True)
        assert (len(model.prefixes) > 0) == (share < 0.85)
    assert set(model.proposers) == {"self", "ngram"}


def test_journals_stop_and_the_draft_gives_its_rows_back(pressed):
    model, memory = pressed
    draft = model.bundle.draft
    model.generate(PROMPT, 20, speculation={"proposer": "self", "window": 4})
    assert draft.length > 0
    memory.share = 0.95
    memory.now += 1
    journal = list(model.bundle.target.zone.journal)
    model.generate(PROMPT, 5)
    assert draft.length == 0
    assert not any(pool.any() for pool in draft.zone.pools.values() if pool.nbytes >= 8192)
    assert len(model.bundle.target.zone.journal) - len(journal) <= 1  # the rewind before the request is still noted
