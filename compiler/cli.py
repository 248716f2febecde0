"""The `dsc` command: parses arguments, calls the same functions that Python callers use, prints.

Exit codes: 0 fine, 1 a check failed, 2 your input, 3 the environment. Each command imports what it
needs when it runs, so that `dsc --help` stays fast.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import traceback
from typing import Any, cast

import typer

from dsc.bundle_schema.errors import DscError, HostError, RequestError
from dsc.compiler import cli_bundle, cli_compile, cli_kernels, cli_run, cli_schedule, cli_tools
from dsc.compiler.console import is_reported

app = typer.Typer(
    name="dsc",
    help="Compile a language model and a way of drafting for it into one .dsmodel file, and run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for module in (cli_compile, cli_bundle, cli_run, cli_schedule, cli_kernels, cli_tools):
    module.register(app)

# Of click, or of the copy of it that newer versions of typer bring along.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)
_INTERRUPTED = 130


def main() -> None:
    """Entry point: errors that a user can act on are one line, anything else keeps its traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names may hold bytes that are no text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _run(sys.argv[1:])
        sys.stdout.flush()
    except DscError as error:
        status = _report(error)
    except BrokenPipeError:  # the reader (`head`, a pager) has gone: not an error
        _discard_output()
        status = 0
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _discard_output()
        status = _report(HostError("standard output", f"cannot be written: {error.strerror}", "free some space"))
    sys.exit(status)


def _report(error: DscError) -> int:
    """Show an error and return its exit code."""
    if "--json" in sys.argv and not is_reported(error):  # one document, never two
        print(json.dumps({"error": {"where": error.where, "what": error.what, "hint": error.hint}}))
    if "--traceback" in sys.argv:
        traceback.print_exception(error)
    else:
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def _discard_output() -> None:
    """What is still buffered goes nowhere, so that Python does not complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    """Run a command line and return its exit code; what does not fit the command's options is a `RequestError`."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("dsc", arguments) as context:
            command.invoke(context)
    except typer.Exit as done:  # `--help`
        return done.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except _UsageError as error:
        if not arguments:  # the help has been shown
            return RequestError.exit_code
        raise _usage(error) from None
    return 0


def _usage(error: Any) -> RequestError:
    """What the parser says, as one of our errors."""
    command = error.ctx.command_path if error.ctx is not None else "dsc"
    return RequestError(command, error.format_message().rstrip("."), f"see `{command} --help`")
