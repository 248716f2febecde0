"""Updates of a running schedule: whole or not at all, by call and by file."""

import json
import os

import numpy as np
import pytest
from scripted_lm import greedy_reference
from toy_bundle import toy_bundle

from dsc.bundle_schema.dflash_config import DflashConfig
from dsc.bundle_schema.errors import ConfigError
from dsc.runtime import load
from dsc.runtime.schedule_config import LiveConfig

TARGET = np.random.default_rng(5).normal(size=(13, 13)).astype(np.float32)
PROMPT = [3, 1, 4]
PLAIN = greedy_reference(TARGET, PROMPT, 50)


def write(path, text: str) -> None:
    path.write_text(text)
    stamp = path.stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(stamp, stamp))  # two writes within the clock's grain are two versions


def test_an_update_is_taken_whole():
    live = LiveConfig(DflashConfig())
    live.update({"windows.max": 6, "policy": "rules"})
    live.update({"rules.flat_slope": 0.3})
    assert (live.current.windows.max, live.current.policy, live.current.rules.flat_slope) == (6, "rules", 0.3)
    assert live.version == 2


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"windows.max": 99}, "windows.max"),
        ({"policy": "calibrated", "windows.maximum": 3}, "windows.maximum"),
        ({"policy": "rules", "windows.min": 8, "windows.default": 4}, "windows"),
        ({"calibrated.decay": float("nan")}, "calibrated.decay"),
    ],
)
def test_a_bad_update_is_refused_whole_and_the_old_one_goes_on(changes, field):
    live = LiveConfig(DflashConfig())
    before = live.current
    with pytest.raises(ConfigError, match=field):
        live.update(changes)
    assert live.current is before
    assert live.version == 0
    assert "refused, call" in live.updates[-1]
    assert field in live.updates[-1]


def test_the_file_lies_over_the_calls_and_goes_when_it_is_deleted(tmp_path):
    path = tmp_path / "override.json"
    live = LiveConfig(DflashConfig(), path)
    live.update({"windows.max": 6})
    write(path, json.dumps({"windows.max": 5}))
    live.poll()
    assert live.current.windows.max == 5
    version = live.version
    live.poll()
    assert live.version == version
    path.unlink()
    live.poll()
    assert live.current.windows.max == 6


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"windows.max": 99}', "windows.max"),
        ('{"windows.max": 5, "windows.max": 6}', "twice"),
        ("{", "valid JSON"),
        ("[1]", "an object is required"),
        ('{"schema_version": "9.0"}', "schema_version"),
    ],
)
def test_a_bad_file_is_refused_whole(tmp_path, text, reason):
    path = tmp_path / "override.json"
    write(path, '{"windows.max": 5}')
    live = LiveConfig(DflashConfig(), path)
    write(path, text + " ")
    live.poll()
    assert live.current.windows.max == 5
    assert "refused, override.json" in live.updates[-1]
    assert reason in live.updates[-1]


@pytest.fixture
def model(tmp_path):
    path = toy_bundle(tmp_path / "toy.dsmodel", TARGET, TARGET, draft_kind="self")
    return load(path, verify="never", override=tmp_path / "override.json")


def test_a_generation_that_runs_changes_between_its_rounds(model, tmp_path):
    stream = model.stream(PROMPT, 50, speculation={"fallback": False})
    blocks = [next(stream), next(stream)]
    assert len(blocks[1].ids) == 5
    model.update_config({"windows.default": 2})
    blocks += [next(stream), next(stream)]
    assert [len(block.ids) for block in blocks[2:]] == [3, 3]
    write(tmp_path / "override.json", '{"windows.default": 6}')
    blocks.append(next(stream))
    assert len(blocks[-1].ids) == 7
    write(tmp_path / "override.json", '{"windows.default": 60} ')
    blocks += list(stream)
    assert [token for block in blocks for token in block.ids] == PLAIN
    assert len(blocks[5].ids) == 7
    stats = model.generate(PROMPT, 5).stats
    assert stats.config_version == 2
    assert any("refused, override.json: override: windows.default" in text for text in stats.config_updates)


def test_a_bad_call_names_the_field_and_changes_nothing(model):
    with pytest.raises(ConfigError, match=r"windows\.default"):
        model.update_config({"policy": "rules", "windows.default": 60})
    assert model.config.policy == "fixed"
    assert list(model.generate(PROMPT, 50).ids) == PLAIN


def test_a_proposer_can_be_put_aside_and_taken_back(model):
    model.update_config({"proposers.self.enabled": False})
    assert model.proposers == ("ngram",)
    assert model.generate(PROMPT, 20).stats.speculation == "off"
    model.update_config({"proposers.self.enabled": True})
    assert model.generate(PROMPT, 20).stats.proposers["self"].rounds > 0
