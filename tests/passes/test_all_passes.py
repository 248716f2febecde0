import re
from dataclasses import is_dataclass
from pathlib import Path

import pytest

from dsc.passes import ALL_PASSES
from dsc.passes.base import GraphPass
from dsc.passes.pipeline import load_pass, parse_pipeline

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ALL_PASSES)
def test_a_pass_is_what_its_entry_says(name):
    cls = load_pass(name)
    assert issubclass(cls, GraphPass)
    assert is_dataclass(cls)
    assert cls.__dataclass_params__.frozen
    assert cls.name == name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
    module = ALL_PASSES[name].partition(":")[0]
    assert module == f"dsc.passes.{name.replace('-', '_')}"
    assert "->" in cls.__doc__
    assert "Rules:" in cls.__doc__
    assert "1. " in cls.__doc__
    assert (HERE / f"test_{name.replace('-', '_')}.py").is_file()


def test_names_are_listed_in_order():
    assert list(ALL_PASSES) == sorted(ALL_PASSES)


def test_every_pass_file_is_listed():
    source = Path(__import__("dsc.passes.base", fromlist=["base"]).__file__).parent
    classes = [
        path.stem for path in source.glob("*.py") if re.search(r"^class \w+\(GraphPass\)", path.read_text(), re.M)
    ]
    listed = {entry.partition(":")[0].rpartition(".")[2] for entry in ALL_PASSES.values()}
    assert set(classes) == listed


def test_every_pass_without_required_options_parses():
    assert [graph_pass.name for graph_pass in parse_pipeline(",".join(ALL_PASSES))] == list(ALL_PASSES)
