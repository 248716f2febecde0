"""A GPU that nothing is built for: every command says which ones there are, in one line, before any work."""

from __future__ import annotations

import sys

import pytest

from dsc.bundle_schema.errors import KernelError
from dsc.compiler.cli import main
from dsc.kernels import aot
from dsc.kernels.gpu_targets import ARCHITECTURES, architecture

COMMANDS = {
    "list": ["kernels", "--arch"],
    "show": ["kernels", "show", "dspark_kv_rollback", "--arch"],
    "compile": ["compile", "/nonexistent", "-o", "/nonexistent.dsmodel", "--backend", "cuda", "--arch"],
}


def refused(arguments, monkeypatch, capsys):
    """Exit code and standard error of a `dsc` command."""
    monkeypatch.setattr(sys, "argv", ["dsc", *arguments])
    with pytest.raises(SystemExit) as status:
        main()
    return status.value.code, capsys.readouterr().err


@pytest.mark.parametrize("name", ["sm_999", "sm_61", "sm_90a", "90", "SM_80", ""])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_architecture_is_answered_with_the_known_ones(command, name, monkeypatch, capsys):
    monkeypatch.setattr(aot, "_build", lambda *_: pytest.fail("work had begun"))
    code, text = refused([*COMMANDS[command], name], monkeypatch, capsys)
    assert code == KernelError.exit_code == 2
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert f"known: {', '.join(ARCHITECTURES)}" in text


def test_a_device_that_nothing_is_built_for_is_answered_with_the_known_ones(tiny_bundle, monkeypatch, capsys):
    code, text = refused(["inspect", str(tiny_bundle), "--device", "sm_999"], monkeypatch, capsys)
    assert (code, text.count("\n")) == (2, 1)
    assert all(name in text for name in ARCHITECTURES if name.startswith("sm_"))


def test_an_assembler_that_does_not_know_the_architecture_is_one_error(tmp_path, monkeypatch, capsys):
    triton = pytest.importorskip("triton", reason="Triton is an extra of the compiler")
    from triton.runtime.errors import PTXASError

    def fail(*_, **__):
        raise PTXASError("ptxas fatal : Value 'sm_80' is not defined for option 'gpu-name'")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing comes from the cache
    monkeypatch.setattr(triton, "compile", fail)
    with pytest.raises(KernelError, match=r"does not compile for sm_80: .*Value 'sm_80' is not defined"):
        aot.compile_kernel(next(iter(_variants())), architecture("sm_80"))
    code, text = refused(["kernels", "show", "dspark_kv_rollback", "--arch", "sm_80"], monkeypatch, capsys)
    assert code == 2
    assert "Value 'sm_80' is not defined" in text
    assert "Traceback" not in text


def _variants():
    from dsc.kernels.verify_table import walk_variants

    return walk_variants()
