"""``weft tune``: try the planner's best few plans, and keep the fastest."""

from __future__ import annotations

import json as json_format
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from shlex import join
from typing import Annotated

import typer

from weft.cli.output import COLUMNS, err, out, print_json, print_table
from weft.cli.plan.forecasts import load_for_cluster
from weft.cli.profiling import measure_profile
from weft.cli.target import Json, Overrides, Target, load, named, profiles_to_write
from weft.cluster.cluster import HOST, Cluster
from weft.cluster.cluster_file import ClusterFile, read_file
from weft.config.errors import ConfigError
from weft.config.load import Loaded
from weft.cost.profile_file import file_name, profiles_folder, save_profile
from weft.elastic.signals import interrupted_once
from weft.lab.lab import refuse_too_much
from weft.lab.leftovers import find_labs, remarks
from weft.lab.tools import why_not_here
from weft.platform.detect import detect
from weft.resolve.overruled import refuse_without_effect
from weft.train.run_folder import RunFolder, write_text
from weft.tune.job import Job, job_of
from weft.tune.page import NUMBERS, PAGE, as_json, page, trial_rows, verdict
from weft.tune.record import Record
from weft.tune.tuning import BEST_PLAN, Limits, Result, Tuning

NO_PROFILE = (
    "this machine has no profile: forecasts are those of an average core, right within {times:g} "
    "times at best, so that more trials are needed; `weft chips profile`, or --profile here, "
    "measures it (two minutes, once)"
)
RESULT = "tune.json"
"""In the folder: what ``--json`` prints."""
RUN = "run"
"""In the folder: the run of ``--then-run``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions:
    """What beside the configuration is asked for."""

    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file with hosts: trials run in the lab that it describes (root on Linux). "
            "Without it they run on this machine.",
        ),
    ] = None
    minutes: Annotated[
        float,
        typer.Option(
            min=0,
            help="Time for all of it, but for what was begun and a first trial; less where no more "
            "trials are worth it.",
        ),
    ] = 10.0
    trials: Annotated[int | None, typer.Option(min=1, help="Most trials.")] = None
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Where this machine has no profile, make it first, as `weft chips profile` does: "
            "two minutes, once.",
        ),
    ] = False
    then_run: Annotated[
        bool,
        typer.Option(
            "--then-run",
            help="Train with the best plan, in OUT/run; --json is then that of the training.",
        ),
    ] = False
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", help="Folder. Started again on the same one, the tuning goes on."),
    ] = None
    json: Json = False


def tune(target: Target = "demo", overrides: Overrides = None, *, options: TuneOptions) -> None:
    """Run short trials of the planner's best plans, learn from each, and keep the fastest.

    Plans take turns with the best so far, so that every comparison has a 95 % interval. What
    trials show of forecasts orders the other plans anew; it ends when no plan is expected to save
    more than a trial costs. A plan that is given (`plan.stages=...`) is tried first. Example:
    `weft tune debug batch.samples=72 --cluster examples/clusters/mix-1.0-0.4.yaml --out tunes/a`.
    """
    recipe, pairs = named(target, overrides)
    loaded, machine = _loaded(target, overrides or []), detect()
    refuse_without_effect(loaded)
    lab = None if options.cluster is None else _lab(options.cluster)
    _refuse_early(loaded, options)
    job = job_of(loaded, recipe, pairs, lab, machine)
    if lab is not None:
        refuse_too_much(lab, machine.nodes[0])
        for remark in remarks(find_labs()):
            err.print(f"[tune] {remark}")
    folder = (options.out_dir or _new_folder(loaded.config.name)).absolute()
    with RunFolder(folder), interrupted_once():
        record = Record.opened(folder, job.asked)
        if not record.candidates and _has_now_a_profile(job, machine, options):
            job = job_of(loaded, recipe, pairs, lab, machine)
        try:
            result = _tuned(job, record, options, folder)
        except KeyboardInterrupt:
            err.print(f"[tune] the same command with --out {folder} goes on")
            raise
    if not options.json:
        _show(result, folder)
    if options.then_run:
        _train(job, options, folder)
    if options.json:
        print_json({"out": str(folder), **as_json(result)})
    else:
        out.print(f"train with it: {join(_command(job, options, folder))}")


def _refuse_early(loaded: Loaded, options: TuneOptions) -> None:
    """What would be seen after minutes."""
    if options.cluster and options.then_run and loaded.config.recovery.alarm == "replan":
        expected = "off or warn with --cluster and --then-run"
        hint = "A run in a lab cannot change its plan; one of `weft train` itself can."
        raise loaded.place(ConfigError("recovery.alarm", "replan", expected, hint))
    if options.profile:
        profiles_to_write(profiles_folder())


def _loaded(target: str, overrides: Sequence[str]) -> Loaded:
    """The configuration; samples need not suit a plan that only the recipe says."""
    says_samples = any(word.removeprefix("--").startswith("batch.samples") for word in overrides)
    return (load_for_cluster if says_samples else load)(target, overrides)


def _lab(file: Path) -> ClusterFile:
    """The lab to try plans in.

    Raises:
        ConfigErrors: the file cannot be used.
        ConfigError: nobody can play it here.
    """
    cluster = read_file(file)
    if not cluster.hosts:
        hint = "Chips of data sheets cannot be tried; `weft plan --cluster` plans for them, and "
        hint += "`weft tune` without --cluster tries plans on the machine that has them."
        raise ConfigError("--cluster", str(file), "a file with hosts, not pools", hint)
    if reason := why_not_here():
        raise ConfigError("--cluster", str(file), "to be root on Linux", f"No lab here: {reason}.")
    return cluster


def _has_now_a_profile(job: Job, machine: Cluster, options: TuneOptions) -> bool:
    """Where this machine's processor had none and one was asked for; else it is said."""
    if not job.space.is_guess:
        return False
    if not options.profile:
        _say(NO_PROFILE.format(times=job.times))
        return False
    (node,) = machine.nodes
    found = measure_profile(node, device=HOST, quick=False, say=lambda text: _say(f"{text} ..."))
    path = profiles_folder() / file_name(found)
    save_profile(found, path)
    _say(f"profile: {path}")
    return True


def _tuned(job: Job, record: Record, options: TuneOptions, folder: Path) -> Result:
    from weft.data.prepare import prepare

    def show(result: Result) -> None:
        write_text(folder / PAGE, page(result))
        write_text(folder / RESULT, json_format.dumps(as_json(result), indent=2))

    prepare(job.config.data, job.config.seed, report=lambda *_: None)
    limits = Limits(minutes=options.minutes, trials=options.trials)
    return Tuning(job, record, limits, _say, show).run()


def _say(text: str) -> None:
    err.print(f"[tune] {text}")


def _show(result: Result, folder: Path) -> None:
    rows = trial_rows(result)
    cells = (row.values() for row in rows)
    print_table(rows[0], cells, right=NUMBERS, header_style="dim", **COLUMNS)
    out.print(f"ended       {result.why}")
    for lesson in result.tuner.lessons():
        words = f"{lesson.times:.2f} times as long as predicted, +- {lesson.within:.0%}"
        out.print(f"learned     {lesson.about}: {words}")
    out.print(f"best        {verdict(result)}")
    out.print(f"page        {folder / PAGE}")


def _command(job: Job, options: TuneOptions, folder: Path) -> Sequence[str]:
    """That trains with the best plan."""
    words = ["weft", "train", *job.target, f"plan.file={folder / BEST_PLAN}"]
    words += ["--out", str(folder / RUN)]
    return words if options.cluster is None else ["weft", "lab", str(options.cluster), "--", *words]


def _train(job: Job, options: TuneOptions, folder: Path) -> None:
    """In place of this process."""
    here = [sys.executable, "-m", "weft"]
    words = _command(job, options, folder)
    whole = [part for word in words for part in (here if word == "weft" else [word])]
    if options.json:
        whole.append("--json")
    out.file.flush()
    err.file.flush()
    os.execv(sys.executable, whole)


def _new_folder(name: str) -> Path:
    return Path("tunes") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
