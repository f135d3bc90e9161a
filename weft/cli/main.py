"""The ``weft`` command. Torch is imported by the commands that need it, never for ``--help``."""

from __future__ import annotations

import os
import sys

import typer

from weft.cli import (
    bench,
    checkpoint,
    chips,
    compare,
    doctor,
    generate,
    lab,
    report,
    schema,
    train,
    verify,
)
from weft.cli.output import err, print_anything
from weft.cli.plan import command as plan
from weft.config.errors import ConfigError, ConfigErrors, RunError

INTERRUPTED = 130
"""How typer ends on Ctrl-C."""

app = typer.Typer(
    help="Train one large model on whatever accelerators you have.\n\n"
    "Start with `weft train demo`; look first with `weft plan demo`.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (train, plan, verify, compare, lab, generate, doctor, report, schema):
    module.register(app)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(chips.app, name="chips")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run a command. Exit code 0: done; 2: the user's mistake; 1: anything else."""
    print_anything()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code; errors have been printed."""
    try:
        app(arguments, prog_name="weft")
    except (ConfigErrors, ConfigError, RunError) as error:
        text = str(error) if isinstance(error, ConfigErrors) else f"error: {error}"
        if isinstance(error, RunError) or _speaks():
            err.print(text, style="red", markup=False)
        return 1 if isinstance(error, RunError) else 2
    except OSError as error:
        if error.filename is None:  # not a file of the user's: a fault in the program
            raise
        err.print(f"error: {error.filename}: {error.strerror}", style="red", markup=False)
        return 1
    except SystemExit as exit_:
        return _exit_code(exit_)
    return 0


def _speaks() -> bool:
    """Of the processes that a launcher started on a machine, one prints why all refuse."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _exit_code(exit_: SystemExit) -> int:
    code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    if code == INTERRUPTED:
        err.print("stopped")
        return 1
    return code
