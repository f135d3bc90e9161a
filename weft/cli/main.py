"""The ``weft`` command. Torch is imported by the commands that need it, never for ``--help``."""

from __future__ import annotations

import sys

import typer

from weft.cli import (
    checkpoint,
    chips,
    doctor,
    generate,
    plan,
    report,
    schema,
    train,
    verify,
)
from weft.cli.output import err
from weft.config.errors import ConfigError, ConfigErrors, RunError

app = typer.Typer(
    help="Train one large model on whatever accelerators you have.\n\n"
    "Start with `weft train demo`; look first with `weft plan demo`.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (train, plan, verify, generate, doctor, report, schema):
    module.register(app)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(chips.app, name="chips")


def main() -> None:
    """Run a command. Exit code 0: done; 2: the user's mistake; 1: anything else."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code; errors have been printed."""
    try:
        app(arguments, prog_name="weft")
    except (ConfigErrors, ConfigError, RunError) as error:
        text = str(error) if isinstance(error, ConfigErrors) else f"error: {error}"
        err.print(text, style="red", markup=False)
        return 1 if isinstance(error, RunError) else 2
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return 0
