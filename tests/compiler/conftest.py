"""Command lines run in this process."""

from __future__ import annotations

import sys

import pytest

from dsc.compiler.cli import main


@pytest.fixture
def dsc(monkeypatch, capsys):
    """Runs a command line in this process and returns its exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dsc", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(dsc):
    """Runs a command line that must be refused and returns the error's one line."""

    def run(*arguments: object, code: int = 2) -> str:
        status, out, err = dsc(*arguments)
        assert (status, out) == (code, ""), (status, out, err)
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    return run
