"""``weft elastic``: change a job while it runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.output import out, print_json
from weft.cli.resolved import resolved_here
from weft.cli.target import OVERRIDES, Json, named
from weft.config.errors import ConfigError, RunError
from weft.config.load import load_config
from weft.plan.plan import Plan
from weft.platform.detect import detect
from weft.resolve.resolve import read_plan, resolve
from weft.train.run_folder import CONFIG_FILE

app = typer.Typer(help="Change a job while it runs.")

ALLOWED = ("plan", "batch.micro", "batch.accumulation")
"""What may differ from what the run was started with."""


@app.callback()
def elastic() -> None:
    """Change a job while it runs."""


@app.command(context_settings=OVERRIDES)
def move(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run that trains now.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="What says the plan, as for `weft train`: keys of plan, batch.micro and "
            "batch.accumulation.",
        ),
    ] = None,
    *,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="The planner's choice for so many ranks.")
    ] = None,
    plan: Annotated[
        str | None, typer.Option("--plan", help='"auto": the planner\'s choice for this machine.')
    ] = None,
    json: Json = False,
) -> None:
    """Let a running job go on under another plan, on more ranks or fewer, without files.

    Its ranks leave after a step with their state in memory, and those that the new plan has work
    for go on in the same processes. Examples: `weft elastic move runs/mine --ranks 2`;
    `weft elastic move runs/mine plan.stages=[{layers: 2},{}]`. The next start of the run has the
    plan that it is started with.
    """
    from weft.elastic.move import ask, await_answer, has_machines, is_there
    from weft.elastic.replan import refuse_move

    if not run.is_dir():
        raise ConfigError("RUN", str(run), "the folder of a run", "There is no such folder.")
    if not is_there(run):
        hint = "It has to be started by `weft train` alone, with recovery.restarts above 0."
        expected = "a run that trains now and can take other plans"
        raise ConfigError("RUN", str(run), expected, hint)
    now = Plan.from_json((run / "plan.json").read_text("utf-8"))
    pairs = _pairs(overrides, ranks, plan, now)
    if has_machines(run):
        asked = _for_machines(run, pairs, ranks or plan, now)
    else:
        loaded = load_config(str(run / CONFIG_FILE), pairs)
        resolved = resolved_here(loaded).resolved
        refuse_move(loaded, resolved, now)
        asked = resolved.plan
    moved = await_answer(run, ask(run, asked))
    if moved.problem:
        raise RunError(f"{run} keeps its plan: {moved.problem}")
    if json:
        print_json({key: value for key, value in asdict(moved).items() if key != "problem"})
        return
    out.print(
        f"after step {moved.after_step} the plan became {moved.words}; step {moved.step} "
        f"was finished {moved.seconds:.1f} s after the request was seen"
    )


def _for_machines(run: Path, pairs: list[str], choice: int | str | None, now: Plan) -> Plan:
    """What is asked of a job on several machines, whose first command knows what they have."""
    if choice is not None:
        expected = "plan.KEY=VALUE, as the job runs on several machines"
        raise ConfigError("--ranks" if isinstance(choice, int) else "--plan", choice, expected)
    families = sorted(set(now.devices))
    device = [f"compute.device={families[0]}"] if len(families) == 1 else []
    loaded = load_config(str(run / CONFIG_FILE), [*device, *pairs])
    file = read_plan(loaded)
    size = None if file is None else file.world_size
    resolved = resolve(loaded, detect(), world_size=size, ranks_here=1, plan=file)
    return resolved.plan


def _pairs(
    overrides: list[str] | None, ranks: int | None, plan: str | None, now: Plan
) -> list[str]:
    """What differs from the run's configuration, each ``key=value``."""
    _, pairs = named("", overrides)
    given = [
        name for name, has in (("--ranks", ranks), ("--plan", plan), ("KEY=VALUE", pairs)) if has
    ]
    if len(given) != 1:
        expected = "one of them, which says the plan"
        raise ConfigError("--ranks, --plan or KEY=VALUE", ", ".join(given) or None, expected)
    if plan not in (None, "auto"):
        raise ConfigError("--plan", plan, '"auto"', "Others are written plan.KEY=VALUE.")
    for pair in pairs:
        key = pair.partition("=")[0]
        if not (key in ALLOWED or key.startswith("plan.")):
            raise ConfigError(key, pair.partition("=")[2], f"a key of {', '.join(ALLOWED)}")
    auto = [f"batch={{samples: {now.global_batch}, micro: null, accumulation: null}}"]
    if ranks is not None:
        return [f"plan={{auto: {{ranks: {ranks}}}}}", *auto]
    return pairs if plan is None else ["plan=auto", *auto]
