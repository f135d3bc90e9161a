"""``weft runs``: what is in the folder of runs, and room on its disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.compare import compare
from weft.cli.output import COLUMNS, err, out, print_json, print_table
from weft.cli.target import Json
from weft.config.errors import ConfigError
from weft.report.units import gib, nats
from weft.train.run_list import (
    STATES,
    RunFacts,
    chosen,
    delete_checkpoints,
    delete_run,
    list_runs,
    superfluous_checkpoints,
    why_not,
)

HEADERS = ("run", "state", "step", "loss", "held-out", "plan", "changed", "size")
NUMBERS = ("step", "loss", "held-out", "size")

app = typer.Typer(help="List, compare and delete runs.")
Folder = Annotated[Path, typer.Option("--folder", help="The folder that holds the runs.")]
RUNS = Path("runs")


@app.callback(invoke_without_command=True)
def runs(context: typer.Context, folder: Folder = RUNS, json: Json = False) -> None:
    """List the runs of a folder: state, steps, loss, plan, when they changed, size on the disk.

    The loss is that of the last step, "held-out" that of held-out text at the end, both in nats a
    token.
    """
    if context.invoked_subcommand is not None:
        if json or folder != RUNS:
            key, value = ("--json", True) if json else ("--folder", str(folder))
            raise ConfigError(key, value, f"after the command: weft runs {context.info_name} ...")
        return
    found = list_runs(folder)
    if json:
        print_json({"runs": [_facts(run) for run in found]})
    elif found:
        print_table(HEADERS, map(_row, found), right=NUMBERS, header_style="dim", **COLUMNS)
    else:
        out.print(f"no runs in {folder}")


def _row(run: RunFacts) -> tuple[str, ...]:
    step = f"{run.step}" if run.steps is None else f"{run.step}/{run.steps}"
    losses = ("" if loss is None else nats(loss) for loss in (run.loss, run.held_out))
    return (run.name, run.state, step, *losses, run.plan, run.changed, gib(run.bytes))


def _facts(run: RunFacts) -> dict[str, object]:
    return {**asdict(run), "folder": str(run.folder)}


app.command("compare")(compare)


@app.command("prune")
def prune(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Names of runs; without any, rules choose."),
    ] = None,
    *,
    folder: Folder = RUNS,
    older_than: Annotated[
        float | None,
        typer.Option("--older-than", min=0, metavar="DAYS", help="Unchanged for so many days."),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", help=f"In this state: {', '.join(STATES)}; may be repeated."),
    ] = None,
    keep: Annotated[
        int, typer.Option("--keep", min=0, help="Never the so many that changed last.")
    ] = 0,
    checkpoints: Annotated[
        bool,
        typer.Option(
            "--checkpoints",
            help="Delete checkpoints alone, but for the one a run goes on from and its last "
            "finite one.",
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes/--dry-run", help="Delete; without it, only say what would go.")
    ] = False,
    json: Json = False,
) -> None:
    """Delete runs, or checkpoints of runs that can be done without.

    A run goes if every rule that is given takes it: `weft runs prune --state empty --yes`,
    `weft runs prune --older-than 30 --keep 5`. A run that a command works in stays, and so does
    whatever is not in the folder itself: links are not followed.
    """
    _refuse_states(state or ())
    if not any((names, state, keep, checkpoints, older_than is not None)):
        hint = "Name runs, or give --older-than, --state, --keep or --checkpoints."
        raise ConfigError("RUN", None, "a run or a rule that says which", hint)
    runs = chosen(folder, names or (), older_than_days=older_than, states=state or (), keep=keep)
    rows = [_pruned(run, checkpoints=checkpoints, yes=yes) for run in runs]
    if json:
        print_json({"deleted": yes, "runs": rows})
        return
    _say(rows, checkpoints=checkpoints, yes=yes)


def _refuse_states(states: Sequence[str]) -> None:
    for each in states:
        if each not in STATES:
            raise ConfigError("--state", each, f"one of {', '.join(STATES)}")


def _pruned(run: RunFacts, *, checkpoints: bool, yes: bool) -> dict[str, object]:
    """What happens, or would happen, to one run."""
    kept = why_not(run)
    if kept:
        return {"name": run.name, "kept": kept, "checkpoints": [], "bytes": 0}
    names: list[str] = []
    freed = run.bytes
    if checkpoints:
        folders, freed = superfluous_checkpoints(run)
        names = [each.name for each in folders]
    if yes:
        (delete_checkpoints if checkpoints else delete_run)(run)
    return {"name": run.name, "kept": "", "checkpoints": names, "bytes": freed}


def _say(rows: Sequence[dict[str, object]], *, checkpoints: bool, yes: bool) -> None:
    verb, total = ("deleted" if yes else "would delete"), 0
    for row in rows:
        names, size = row["checkpoints"], row["bytes"]
        assert isinstance(names, list)
        assert isinstance(size, int)
        if row["kept"]:
            err.print(f"keeps {row['name']}: {row['kept']}")
        elif names or not checkpoints:
            of = f": {', '.join(names)}" if checkpoints else ""
            out.print(f"{verb} {row['name']}{of} ({gib(size)})")
            total += size
    rest = "" if yes or not total else "; --yes does it"
    out.print(f"{gib(total)} {'freed' if yes else 'to free'}{rest}")
