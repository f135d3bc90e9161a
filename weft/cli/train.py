"""``weft train``: prepare the data, start the ranks, watch them."""

from __future__ import annotations

import json as json_format
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from weft.cli.output import err, finish, out, print_json
from weft.cli.plan import show as print_plan
from weft.cli.summary import print_summary
from weft.cli.target import OVERRIDES, Json, Overrides, Target, load
from weft.cluster.detect import detect
from weft.comm.place import Place
from weft.config.errors import ConfigError, show
from weft.config.load import Loaded, explain, to_yaml
from weft.data.prepare import prepare
from weft.elastic.processes import RanksFailedError, run_rank, run_ranks, warm_context
from weft.report.progress import Preparing, choose_mode
from weft.train.job import SUMMARY_FILE, Job
from weft.train.resolve import Resolved, read_plan, resolve
from weft.train.resume import CONFIG_FILE, changes, saved_step

WORKER = "weft.train.worker:main"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train", context_settings=OVERRIDES)(train)


def train(
    target: Target = "demo",
    overrides: Overrides = None,
    *,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", help="Run folder. Started again on the same one, the run goes on."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="End after this step; a later start goes on.")
    ] = None,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    explain_config: Annotated[
        bool, typer.Option(help="Print every value and where it came from, and stop.")
    ] = False,
) -> None:
    """Train a language model.

    Examples: `weft train demo`; `weft train data.path=my.txt train.steps=500`;
    `torchrun --nproc-per-node 4 -m weft train demo plan.shares=[1,1,1,1] --out runs/four`.
    """
    loaded = load(target, overrides)
    if explain_config:
        _explain(loaded, json=json)
        return
    place = Place.from_environment()
    world_size = place.world_size if place else None
    resolved = resolve(loaded, detect(), world_size=world_size, plan=read_plan(loaded))
    stream = sys.stderr if json else sys.stdout
    job = Job(
        config=resolved.config,
        plan=resolved.plan,
        out=out_dir or _new_folder(resolved.config.name, place),
        last_step=min(steps or resolved.config.train.steps, resolved.config.train.steps),
        threads=resolved.threads,
        console=choose_mode(stream, quiet=quiet),
        json=json,
    )
    if place is not None:
        finish(_join(place, job, resolved))
        return
    _open_folder(job, resolved)
    finish(_start(job))


def _explain(loaded: Loaded, *, json: bool) -> None:
    rows = explain(loaded)
    if json:
        print_json({key: {"value": value, "from": str(origin)} for key, value, origin in rows})
        return
    width = max(len(key) for key, _, _ in rows)
    for key, value, origin in rows:
        out.print(f"{key:<{width}}  {show(value):<24}  {origin}", markup=False)


def _new_folder(name: str, place: Place | None) -> Path:
    if place is not None:
        hint = "All processes write to one folder: give its path."
        raise ConfigError("--out", None, "a folder that every machine of the job sees", hint)
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def _open_folder(job: Job, resolved: Resolved) -> None:
    """Create the run folder, or check that this configuration goes on with the run in it."""
    say = err if job.json or job.console == "quiet" else out
    try:
        job.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "Choose another folder with --out."
        raise ConfigError("--out", str(job.out), "a folder that can be written", hint) from error
    differing = changes(job.out, job.config)
    step = saved_step(job.out)
    if not job.json and job.console != "quiet":
        print_plan(resolved)
        say.print(f"run folder: {job.out}" + (f", going on after step {step}" if step else ""))
        for change in differing:
            say.print(f"  changed since the run began: {change}", markup=False)
    (job.out / CONFIG_FILE).write_text(to_yaml(job.config))
    (job.out / "plan.json").write_text(job.plan.to_json())
    (job.out / "cluster.json").write_text(resolved.cluster.to_json())
    (job.out / "origins.json").write_text(json_format.dumps(resolved.origins, indent=2))


def _start(job: Job) -> int:
    """Run every rank on this machine."""
    context = warm_context()
    if saved_step(job.out) >= job.last_step and (job.out / SUMMARY_FILE).exists():
        return _tell_end(job, already=True)
    with Preparing(stream=sys.stderr if job.json else sys.stdout, mode=job.console) as report:
        prepare(job.config.data, job.config.seed, report=report)
    try:
        run_ranks(WORKER, (job,), job.plan.world_size, folder=job.out, context=context)
    except RanksFailedError as error:
        return _tell_failure(job, error)
    return _tell_end(job)


def _join(place: Place, job: Job, resolved: Resolved) -> int:
    """Be one rank of a job that another launcher started."""
    if place.rank == 0:
        _open_folder(job, resolved)
    run_rank(WORKER, place, (job,), folder=job.out)
    return _tell_end(job) if place.rank == 0 else 0


def _tell_failure(job: Job, error: RanksFailedError) -> int:
    """The first failure in full, then what was saved and how to go on."""
    first = error.first
    log = "above" if first.rank == 0 else f"in {job.out}/logs/rank{first.rank}.log"
    if first.cause == "config":
        err.print(f"error: {escape(first.message)}", style="red")
        return 2
    err.print(f"error: rank {first.rank} {escape(first.message)}", style="red")
    if first.detail:
        err.print(first.detail.rstrip(), markup=False)
    err.print(f"  what it printed is {log}; the other ranks were ended", markup=False)
    err.print(f"  {_saved(job)}", markup=False)
    return 1


def _saved(job: Job) -> str:
    step = saved_step(job.out)
    if not step:
        return "nothing was saved yet: the next start begins again"
    return f"saved: step {step}; the same command with --out {job.out} goes on from there"


def _tell_end(job: Job, *, already: bool = False) -> int:
    """What the run came to. Exit code 1 if it was stopped before its last step."""
    if saved_step(job.out) < job.last_step:
        err.print(f"stopped before step {job.last_step}; {_saved(job)}")
        return 1
    summary = json_format.loads((job.out / SUMMARY_FILE).read_text())
    if job.json:
        print_json({"out": str(job.out), **summary})
    elif job.console != "quiet":
        if already:
            out.print(f"step {job.last_step} was reached before; nothing to do")
        print_summary(job.out, summary)
    return 0
