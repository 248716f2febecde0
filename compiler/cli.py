"""The `dsc` command: parses arguments, calls the same functions that Python callers use, prints.

Exit codes: 0 fine, 1 a check failed, 2 your input, 3 the environment. Each command imports what it
needs when it runs, so that `dsc --help` stays fast.
"""

from __future__ import annotations

import json
import os
import sys

import typer

from dsc.bundle_schema.errors import DscError
from dsc.compiler import cli_bundle, cli_compile, cli_kernels, cli_run, cli_schedule, cli_tools
from dsc.compiler.console import ReportedFailure

app = typer.Typer(
    name="dsc",
    help="Compile a language model and a way of drafting for it into one .dsmodel file, and run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for module in (cli_compile, cli_bundle, cli_run, cli_schedule, cli_kernels, cli_tools):
    module.register(app)


def main() -> None:
    """Entry point: errors that a user can act on are one line, anything else keeps its traceback."""
    try:
        app()
    except DscError as error:
        if "--traceback" in sys.argv:
            raise
        if "--json" in sys.argv and not isinstance(error, ReportedFailure):  # one document, never two
            print(json.dumps({"error": {"where": error.where, "what": error.what, "hint": error.hint}}))
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader (`head`, a pager) has gone: not an error, and Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
