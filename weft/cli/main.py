"""The ``weft`` command. Torch is imported by the commands that need it, never for ``--help``."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weft.cli import bench, checkpoint, chips, elastic, grow, runs
from weft.cli.chat import chat
from weft.cli.compare import compare, verify
from weft.cli.doctor import doctor
from weft.cli.generate import generate
from weft.cli.init import init
from weft.cli.lab import lab
from weft.cli.options import spread
from weft.cli.output import err, print_anything, print_json
from weft.cli.plan.command import PlanOptions, plan
from weft.cli.saved import report
from weft.cli.target import OVERRIDES
from weft.cli.train import TrainOptions, train
from weft.cli.tune import TuneOptions, tune
from weft.comm.launchers import VariableError
from weft.config.errors import STOPPED, ConfigError, ConfigErrors, PassedOver, RunError, no_room
from weft.config.load import config_schema
from weft.platform.threads import give_up_cores_soon
from weft.version import __version__

INTERRUPTED = 130
"""How typer ends on Ctrl-C."""
UsageError: Any = typer.BadParameter.__mro__[1]
"""Click's, which typer brings itself or imports, by version."""


class _Commands(TyperGroup):
    """The commands by name; where one of a group is asked for alone, the error says it whole."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        groups = ((n, c) for n, c in self.commands.items() if isinstance(c, TyperGroup))
        whole = [f"`weft {name} {word}`" for name, group in groups if word in group.commands]
        if whole and word not in self.commands and not ctx.resilient_parsing:
            raise ConfigError("COMMAND", word, "a command", f"Write {' or '.join(whole)}.")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    help="Train one large model on whatever accelerators you have.\n\n"
    "Start with `weft train demo`; look first with `weft plan demo`. With text of your own: "
    "`weft init --data my.txt`, then `weft train weft.yaml`.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def schema() -> None:
    """Print the JSON schema of a configuration file.

    Save it, and begin your YAML with `# yaml-language-server: $schema=PATH`: editors then complete
    keys and show what each one means.
    """
    print_json(config_schema())


@app.callback()
def weft(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            callback=lambda asked: _tell_version() if asked else None,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Options of the command without a subcommand; each has done its work before this is called."""


def _tell_version() -> None:
    typer.echo(f"weft {__version__}")
    raise typer.Exit


TRAINING, PLANNING, RUNS, MACHINE = "Train", "Plan and rehearse", "Look at runs", "This machine"
app.command(rich_help_panel=TRAINING)(init)
app.command(rich_help_panel=TRAINING, context_settings=OVERRIDES)(spread(train, TrainOptions))
app.command(rich_help_panel=TRAINING)(chat)
app.command(rich_help_panel=TRAINING)(generate)
app.add_typer(grow.app, name="grow", rich_help_panel=TRAINING)
app.command(rich_help_panel=PLANNING, context_settings=OVERRIDES)(spread(plan, PlanOptions))
app.command(rich_help_panel=PLANNING, context_settings=OVERRIDES)(spread(tune, TuneOptions))
app.command(rich_help_panel=PLANNING)(lab)
app.add_typer(bench.app, name="bench", rich_help_panel=PLANNING)
app.add_typer(runs.app, name="runs", rich_help_panel=RUNS)
app.command(rich_help_panel=RUNS)(report)
app.command(rich_help_panel=RUNS)(compare)
app.command(rich_help_panel=RUNS, context_settings=OVERRIDES)(verify)
app.add_typer(elastic.app, name="elastic", rich_help_panel=RUNS)
app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel=RUNS)
app.add_typer(chips.app, name="chips", rich_help_panel=MACHINE)
app.command(rich_help_panel=MACHINE)(doctor)
app.command(rich_help_panel=MACHINE)(schema)


def main() -> None:
    """Run a command. Exit code 0: done; 2: the user's mistake; 75: stopped; 1: anything else."""
    give_up_cores_soon()
    print_anything()
    warnings.formatwarning = _in_a_line(warnings.formatwarning)
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code; errors have been printed."""
    try:
        _refuse_nowhere(arguments)
        code: Any = app(arguments, prog_name="weft", standalone_mode=False)
    except (UsageError, typer.Abort) as error:
        if isinstance(error.__cause__, EOFError):  # which nobody typed
            raise error.__cause__ from None
        code = _tell_usage(error)
    except (ConfigErrors, ConfigError, RunError) as error:
        return _tell(error)
    except OSError as error:
        return _tell_file(error)
    except SystemExit as exit_:
        code = exit_.code  # what a broken pipe comes to
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        err.print("stopped")
        return STOPPED
    return code or 0


def _refuse_nowhere(arguments: Sequence[str]) -> None:
    """A variable of a shell that is not set would be the folder that one is in.

    Raises:
        ConfigError: ``--out`` names nothing.
    """
    if "--out=" in arguments or ("--out", "") in pairwise(arguments):
        raise ConfigError("--out", "", "a name", "`--out .` is the folder that you are in.")


def _in_a_line(otherwise: Callable[..., str]) -> Callable[..., str]:
    """How warnings are written: those for whoever gave the command without a place in the code."""

    def written(message: Warning | str, category: type[Warning], *place: Any) -> str:
        if issubclass(category, PassedOver):
            return f"warning: {message}\n"
        return otherwise(message, category, *place)

    return written


def _tell(error: ConfigErrors | ConfigError | RunError) -> int:
    text = str(error) if isinstance(error, ConfigErrors) else f"error: {error}"
    if isinstance(error, RunError | VariableError) or _speaks():
        err.print(text, style="red")
    return error.exit_code if isinstance(error, RunError) else 2


def _tell_file(error: OSError) -> int:
    """Raises it where it is of no file of the user's: a fault in the program."""
    if error.filename is None and not no_room(error):
        raise error
    err.print(f"error: {no_room(error) or f'{error.filename}: {error.strerror}'}", style="red")
    return 1


def _tell_usage(error: Any) -> int:
    """In one sentence, as all that a person wrote wrong; a command without words told its help."""
    if isinstance(error, typer.Abort):
        return INTERRUPTED
    if said := error.format_message():
        command = error.ctx.command_path if error.ctx else "weft"
        stop = "" if said[-1] in ".?)" else "."
        err.print(f"error: {said}{stop} See `{command} --help`.", style="red")
    return 2


def _speaks() -> bool:
    """Of the processes that a launcher started on a machine, one prints why all refuse."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
