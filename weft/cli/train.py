"""``weft train``: prepare the data, start the ranks, watch them."""

from __future__ import annotations

import json as json_format
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from itertools import chain, count
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.place import KEY, LOAD, place_of, refuse_missing
from weft.checkpoint.run_of import refuse_other
from weft.checkpoint.store import is_free
from weft.cli.one_rank import no_new_logs, refusals_on_the_terminal, stoppable
from weft.cli.output import err, finish, out, print_json, say, warn
from weft.cli.plan.text import folded, memory_table, show_plan
from weft.cli.resolved import (
    ResolvedRun,
    refuse_unmeasured,
    resolved_among,
    resolved_here,
    resolved_on_nodes,
)
from weft.cli.summary import print_profile, print_summary, print_traffic, profile_of
from weft.cli.target import Json, Overrides, Target, folder_to_write, load
from weft.cluster.cluster import HOST
from weft.comm.address import RankAddress
from weft.config.errors import STOPPED, ConfigError, ConfigErrors, DivergedError, show
from weft.config.load import Loaded, explain, to_yaml
from weft.elastic.failure import RanksFailedError
from weft.elastic.on_ray import run_on_ray
from weft.elastic.processes import preloaded, run_on, run_rank, run_ranks, warm_context
from weft.elastic.recovery import Restarts
from weft.elastic.signals import Asked, interrupted_once
from weft.report.events import EventLog
from weft.report.metrics import refuse_missing_packages
from weft.report.progress import Preparing, choose_mode
from weft.report.run_files import number
from weft.resolve.folder_here import speed_note
from weft.resolve.memory_here import positions_here, refuse_too_large
from weft.resolve.overruled import refuse_without_effect
from weft.resolve.peaks import peaks_here
from weft.resolve.prediction import AUTO_FILE, PREDICTION_FILE, Prediction
from weft.resolve.queues import refuse_few_queues
from weft.resolve.rank_chips import CLUSTER_VARIABLE
from weft.resolve.resolve import Resolved
from weft.train.job import Job
from weft.train.run_folder import (
    CONFIG_FILE,
    RunFolder,
    changes,
    has_saved,
    saved_step,
    saved_summary,
    summary_of,
)

if TYPE_CHECKING:
    from weft.cli.on_nodes import OnNode
    from weft.elastic.nodes.fleet import Fleet

WORKER = "weft.train.worker:main"
AGENT_S = 30.0
"""How long to wait, after a failure, for what ranks had copied to be written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """What beside the configuration is asked for."""

    out_dir: Annotated[
        Path | None,
        typer.Option("--out", help="Run folder. Started again on the same one, the run goes on."),
    ] = None
    steps: Annotated[
        int | None, typer.Option(min=1, help="End after this step; a later start goes on.")
    ] = None
    json: Json = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False
    comm_report: Annotated[
        bool, typer.Option(help="Print what one step sent, by collective, and keep it.")
    ] = False
    profile: Annotated[
        bool, typer.Option(help="Trace two steps of every rank, and say who waited for what.")
    ] = False
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            help="Started once on each machine, by srun, torchrun, mpirun or you: run so many "
            "ranks there, or `auto`. Lost ranks and machines are replaced while others go on."
        ),
    ] = None
    launcher: Annotated[
        str | None,
        typer.Option(help='"ray": start the ranks on the Ray cluster that RAY_ADDRESS names.'),
    ] = None
    explain_config: Annotated[
        bool, typer.Option(help="Print every value and where it came from, and stop.")
    ] = False


def train(target: Target = "demo", overrides: Overrides = None, *, options: TrainOptions) -> None:
    """Train a language model.

    Examples: `weft train demo`; `weft train data.path=my.txt train.steps=500`;
    `torchrun --nproc-per-node 4 -m weft train demo plan.shares=[1,1,1,1] --out runs/four`.
    `weft train demo --init FOLDER` begins with the model, the weights and the tokenizer of a
    Hugging Face folder.
    """
    began = time.time()
    loaded = load(target, overrides)
    if options.explain_config:
        _explain(loaded, json=options.json)
        return
    if options.launcher is not None:
        finish(_on_ray(loaded, target, overrides or [], options))
        return
    if options.nproc_per_node is not None:
        finish(_on_nodes(loaded, options, options.nproc_per_node, began))
        return
    address = RankAddress.from_environment()
    work = partial(_train, loaded, options, address, began)
    finish(work() if address is None else stoppable(address, work))


def _train(loaded: Loaded, options: TrainOptions, address: RankAddress | None, began: float) -> int:
    """All ranks on this machine, or the one that another launcher started here."""
    with ExitStack() as until_joined:
        if address is None:
            asked = resolved_here(loaded, out=options.out_dir, may_plan=True, quiet=options.quiet)
        else:
            _refuse_replan(loaded)
            asked = resolved_among(
                loaded, address, until_joined, out=options.out_dir, quiet=options.quiet
            )
        _refuse_idle(loaded)
        resolved = asked.resolved
        if address is None or address.local_rank == 0:
            warn(resolved.warnings)
        on_this_machine = _ranks_on_this_machine(resolved, address)
        _refuse_too_large(loaded, resolved, on_this_machine)
        refuse_few_queues(resolved.plan, os.environ)
        out = options.out_dir or _new_folder(resolved.config.name, address)
        prediction = _predict(asked, address)
        if resolved.config.recovery.alarm == "replan":
            refuse_unmeasured(loaded, resolved, prediction.busy_s, prediction.problem)
        job = _job(asked, options, out, on_this_machine, prediction, began)
        _refuse_unknown_place(loaded, job)
        return _start(job, loaded, resolved) if address is None else _join(address, job, resolved)


def _job(
    asked: ResolvedRun,
    options: TrainOptions,
    out: Path,
    ranks: Sequence[int],
    prediction: Prediction,
    began: float,
) -> Job:
    """``ranks``: those that this machine runs."""
    resolved = asked.resolved
    every_step = resolved.config.train.steps
    return Job(
        config=resolved.config,
        plan=resolved.plan,
        out=out,
        last_step=min(options.steps or every_step, every_step),
        threads=resolved.threads,
        console=choose_mode(sys.stderr if options.json else sys.stdout, quiet=options.quiet),
        json=options.json,
        comm_report=options.comm_report,
        profile=options.profile,
        prediction=prediction,
        peaks=peaks_here(resolved, ranks),
        files=_files(asked, prediction),
        began=began,
    )


def _refuse_idle(loaded: Loaded) -> None:
    """What would have no effect, or needs a package that is not there."""
    refuse_without_effect(loaded)
    try:
        refuse_missing_packages(loaded.config.metrics)
    except ConfigError as error:
        raise loaded.place(error) from error


def _on_nodes(loaded: Loaded, options: TrainOptions, seats: str, began: float) -> int:
    """Guard the ranks of this machine; on node 0, guide those of all."""
    from weft.cli.on_nodes import OnNode, guard_ranks

    on_node = OnNode.asked(loaded, seats, options.out_dir, options.steps)
    _refuse_idle(loaded)
    _refuse_moves(loaded)
    if on_node.address.rank > 0:
        return guard_ranks(on_node, partial(_refuse_too_large, loaded))
    return _guide(loaded, options, on_node, began)


def _guide(loaded: Loaded, options: TrainOptions, on_node: OnNode, began: float) -> int:
    """The command of node 0."""
    from weft.cli.on_nodes import fleet_of
    from weft.elastic.nodes.head import Head
    from weft.elastic.nodes.places import first_places, ranks_of, refuse_unsuited

    hello, out = on_node.hello(), on_node.out
    head = Head(
        out, on_node.address, hello, quiet_s=on_node.quiet_s, tell=lambda text: warn([text])
    )
    with RunFolder(out) as folder, interrupted_once(), head:
        context = warm_context()
        differing = changes(out, loaded.config)
        try:
            head.gather(on_node.arrival_s)
            seats = [node.hello.machine for node in head.there for _ in range(node.hello.seats)]
            asked = resolved_on_nodes(
                loaded, seats, ranks_here=hello.seats, out=out, quiet=options.quiet
            )
            resolved = asked.resolved
            warn(resolved.warnings)
            places = first_places(head.there, resolved.plan)
            if resolved.config.recovery.when_lost == "replace":
                head.refuses = partial(refuse_unsuited, places)
            here = [rank for rank, place in enumerate(places) if place.node == 0]
            _refuse_too_large(loaded, resolved, here)
            refuse_few_queues(resolved.plan, os.environ)
            prediction = _predict(asked, None, ranks_here=len(here))
            job = _job(asked, options, out, here, prediction, began)
            _refuse_unknown_place(loaded, job)
            if saved_step(out) >= job.last_step and saved_summary(out) is not None:
                return _tell_end(job, already=True)
            head.offer(job.plan.to_json(), ranks_of(places))
        except KeyboardInterrupt:
            err.print("stopped before training began")
            head.code = STOPPED
            return head.code
        with fleet_of(head, on_node, places, context) as fleet:
            run = partial(_run_on_nodes, loaded, resolved, job, fleet)
            head.code = _work(job, folder, resolved, differing, run)
        return head.code


def _run_on_nodes(loaded: Loaded, resolved: Resolved, job: Job, fleet: Fleet) -> None:
    """All ranks, to the end, on whatever machines are there."""
    from weft.elastic.drift import FirstOf
    from weft.elastic.move import Moves
    from weft.elastic.nodes.fleet import Replaced
    from weft.elastic.nodes.places import refuse_unsuited
    from weft.elastic.nodes.plans import Arrivals, NodePlans

    recovery, asked = job.config.recovery, Asked()
    if recovery.when_lost == "replace":
        fleet.head.refuses = lambda hello: refuse_unsuited(fleet.places, hello)
    plans = NodePlans(loaded, resolved, job, fleet)
    arrivals = Arrivals(fleet, job, plans, say)
    replaced = Replaced(
        fleet,
        Restarts(job, say, plans),
        plan=arrivals.plan,
        tell=say,
        asked=asked,
        wait_s=job.config.train.timeout_s,
    )
    with ExitStack() as stack:
        moves: list[Moves | Arrivals] = [arrivals]
        if recovery.restarts > 0:
            moves.append(stack.enter_context(Moves(plans, say)))
        run_on(
            fleet,
            (job,),
            job.plan.world_size,
            folder=job.out,
            recover=replaced if recovery.restarts > 0 else None,
            heartbeat_s=recovery.heartbeat_s,
            moves=FirstOf(moves),
            asked=asked,
        )


def _on_ray(loaded: Loaded, target: str, overrides: Sequence[str], options: TrainOptions) -> int:
    """The same command as every rank of a Ray cluster."""
    _refuse_replan(loaded)
    if options.launcher != "ray":
        raise ConfigError("--launcher", options.launcher, '"ray"', "Others start it themselves.")
    if options.out_dir is None:
        hint = "All processes write to one folder: give its path."
        raise ConfigError("--out", None, "a folder that every machine of the job sees", hint)
    if find_spec("ray") is None:
        hint = "pip install 'weft[ray]' on every node."
        raise ConfigError("--launcher", "ray", "the package ray", hint)
    is_auto = loaded.config.plan.auto is not None
    ranks = None if is_auto else resolved_here(loaded).resolved.plan.world_size
    flags = {
        "--json": options.json,
        "--quiet": options.quiet,
        "--comm-report": options.comm_report,
        "--profile": options.profile,
    }
    words = ["train", target, *overrides, "--out", str(options.out_dir)]
    words += [] if options.steps is None else ["--steps", str(options.steps)]
    words += [flag for flag, is_set in flags.items() if is_set]
    try:
        return run_on_ray(words, ranks, gpus=loaded.config.compute.device != HOST)
    except RanksFailedError as error:
        err.print(f"error: {error}", style="red")
        return 2 if error.first.cause == "config" else 1


def _refuse_replan(loaded: Loaded) -> None:
    """Who starts the ranks decides what becomes of lost ones."""
    if loaded.config.recovery.when_lost == "replan":
        expected = "replace, under a launcher other than weft train itself"
        raise loaded.place(ConfigError("recovery.when_lost", "replan", expected))
    _refuse_moves(loaded)


def _refuse_moves(loaded: Loaded) -> None:
    """A job on several machines, or whose ranks another launcher started, keeps its plan."""
    if loaded.config.recovery.alarm == "replan":
        expected = "off or warn, under a launcher other than weft train itself"
        raise loaded.place(ConfigError("recovery.alarm", "replan", expected))
    if loaded.config.move_experts is not None:
        raise loaded.place(ConfigError("move_experts", "a section", "null under other launchers"))


def _refuse_unknown_place(loaded: Loaded, job: Job) -> None:
    """``checkpoint.to`` has to be an address that can be opened here, or a folder of this run's,
    and what a new run begins with has to be there."""
    load = job.config.checkpoint.load
    try:
        if isinstance(place := job.checkpoints, Path):
            refuse_other(place, job.out)
            if job.config.checkpoint.to is not None:
                folder_to_write(KEY, place)
        if load is not None and not has_saved(job.out):
            refuse_missing(place_of(load, LOAD), LOAD)
    except ConfigError as error:
        raise loaded.place(error) from error


def _files(asked: ResolvedRun, prediction: Prediction) -> dict[str, str]:
    """What says in the run folder what is run."""
    resolved = asked.resolved
    files = {
        CONFIG_FILE: to_yaml(resolved.config),
        "plan.json": resolved.plan.to_json(),
        "cluster.json": resolved.cluster.to_json(),
        "origins.json": json_format.dumps(resolved.origins, indent=2),
        PREDICTION_FILE: prediction.to_json(),
    }
    if asked.chosen is not None:
        files[AUTO_FILE] = asked.chosen.to_json()
    return files


def _ranks_on_this_machine(resolved: Resolved, address: RankAddress | None) -> range:
    """All without another launcher; with one, as many as it says. A lab's machine has one rank."""
    if address is None:
        return range(resolved.plan.world_size)
    here = None if CLUSTER_VARIABLE in os.environ else address.ranks_here
    first = address.rank - address.local_rank if here else address.rank
    return range(first, first + (here or 1))


def _refuse_too_large(loaded: Loaded, resolved: Resolved, ranks: Sequence[int]) -> None:
    """With a table of what the ranks of this machine would hold."""
    try:
        refuse_too_large(loaded, resolved, ranks)
    except ConfigErrors:
        err.print(*folded(list(memory_table(positions_here(resolved, ranks)))), sep="\n")
        raise


def _predict(
    asked: ResolvedRun, address: RankAddress | None, *, ranks_here: int | None = None
) -> Prediction:
    """Of the whole job. Only the rank that writes it down needs it."""
    if address is not None and address.rank > 0:
        return Prediction()
    from weft.resolve.prediction import predict_run

    here = address.ranks_here if address is not None else ranks_here
    found = predict_run(asked.resolved, ranks_here=here, chips=asked.chips)
    warn(speed_note(asked.resolved, here, found.quantities.step_time_s))
    return found


def _explain(loaded: Loaded, *, json: bool) -> None:
    rows = explain(loaded)
    if json:
        print_json({key: {"value": value, "from": str(origin)} for key, value, origin in rows})
        return
    width = max(len(key) for key, _, _ in rows)
    for key, value, origin in rows:
        out.print(f"{key:<{width}}  {show(value):<24}  {origin}")


def _new_folder(name: str, address: RankAddress | None) -> Path:
    """A folder that is not there yet: runs that begin in the same second have one each."""
    if address is not None:
        hint = "All processes write to one folder: give its path."
        raise ConfigError("--out", None, "a folder that every machine of the job sees", hint)
    wanted = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    others = (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))
    return next(folder for folder in chain([wanted], others) if not folder.exists())


def _show_start(job: Job, resolved: Resolved, differing: Sequence[str]) -> None:
    if job.json or job.console == "quiet":
        return
    show_plan(resolved)
    going_on = f", going on after step {step}" if (step := _saved(job)[0]) else ""
    out.print(f"run folder: {job.out}{going_on}")
    for change in differing:
        out.print(f"  changed since its last start: {change}")


def _start(job: Job, loaded: Loaded, resolved: Resolved) -> int:
    """Run every rank on this machine."""
    differing = changes(job.out, job.config)
    if saved_step(job.out) >= job.last_step and saved_summary(job.out) is not None:
        return _tell_end(job, already=True)
    with RunFolder(job.out) as folder, interrupted_once():
        context = warm_context(preloaded(resolved.plan))
        run = partial(_run, job, context, loaded, resolved)
        return _work(job, folder, resolved, differing, run)


def _work(
    job: Job,
    folder: RunFolder,
    resolved: Resolved,
    differing: Sequence[str],
    run: Callable[[], None],
) -> int:
    """Prepare the data and run all ranks; the exit code of the command."""
    from weft.data.prepare import prepare

    _show_start(job, resolved, differing)
    stream = sys.stderr if job.json else sys.stdout
    try:
        with Preparing(stream=stream, mode=job.console) as report:
            prepare(job.config.data, job.config.seed, report=report)
    except ConfigError as error:
        error.where = resolved.origins.get(error.key, "")
        raise ConfigErrors([error]) from error
    except KeyboardInterrupt:
        err.print("stopped before training began")
        return STOPPED
    step_before = saved_step(job.out)
    try:
        run()
    except RanksFailedError as error:
        if error.first.cause == "config":
            folder.drop_new_logs()
        else:
            _note_failure(job, error)
        return _tell_failure(job, error, step_before)
    return _tell_end(job)


def _note_failure(job: Job, error: RanksFailedError) -> None:
    first, log = error.first, EventLog(job.out, began=job.began, watches=True)
    facts = {"cause": first.cause, "phase": first.phase}
    log.write("end", str(error), rank=first.rank, facts=facts)


def _run(job: Job, context: ForkServerContext, loaded: Loaded, resolved: Resolved) -> None:
    """All ranks, to the end; what becomes of lost ones is up to ``recovery``."""
    from weft.elastic.drift import Drift, FirstOf
    from weft.elastic.loads import Loads
    from weft.elastic.move import Moves
    from weft.elastic.replan import Replans

    replans, recovery = Replans(loaded, resolved, job), job.config.recovery
    with ExitStack() as stack:
        moves: list[Moves | Drift | Loads] = []
        if recovery.restarts:
            moves.append(stack.enter_context(Moves(replans, say)))
        if recovery.alarm == "replan":
            moves.append(stack.enter_context(Drift(replans, say)))
        if job.config.move_experts is not None:
            asked = job.config.move_experts
            moves.append(Loads(replans, asked.every, say, copies=asked.replicate))
        run_ranks(
            WORKER,
            (job,),
            job.plan.world_size,
            folder=job.out,
            context=context,
            recover=Restarts(job, say, replans) if recovery.restarts else None,
            heartbeat_s=recovery.heartbeat_s,
            moves=FirstOf(moves) if moves else None,
        )


def _join(address: RankAddress, job: Job, resolved: Resolved) -> int:
    """Be one rank of a job that another launcher started."""
    differing = changes(job.out, job.config)  # on every rank, so that every rank refuses
    if address.rank > 0:
        with refusals_on_the_terminal():
            run_rank(WORKER, address, (job,), folder=job.out)
        return 0
    with RunFolder(job.out) as folder:
        _show_start(job, resolved, differing)
        with no_new_logs(folder):
            run_rank(WORKER, address, (job,), folder=job.out)
        return _tell_end(job)


def _tell_failure(job: Job, error: RanksFailedError, step_before: int) -> int:
    """The first failure in full, then what was saved and how to go on."""
    first = error.first
    if first.cause == "config":
        heading = "" if first.message.startswith("error: ") else "error: "
        err.print(heading + first.message, style="red")
        return 2
    if first.cause == "diverged":
        err.print(f"error: {first.message}", style="red")
        return DivergedError.exit_code
    err.print(f"error: {error}", style="red")
    if first.detail:
        err.print(first.detail.rstrip())
    if error.waits is not None:
        calls = f"{job.out}/logs/flight-rank*.json"
        err.print(f"  every rank that answered left its last calls in {calls}")
    log = "above" if first.rank == 0 else f"in {job.out}/logs/rank{first.rank}.log"
    err.print(f"  what it printed is {log}; the other ranks were ended")
    if not is_free(job.held, AGENT_S):
        err.print("  a later checkpoint than the one named here is still being written")
    step, saved = _saved(job)
    if first.cause != "machine" or (step or 0) > step_before:
        err.print(f"  {saved}")
    return 1


def _saved(job: Job) -> tuple[int | None, str]:
    """The step of what was saved, None where its storage does not answer; and what that means."""
    try:
        step = saved_step(job.out)
    except CheckpointError as error:
        again = f"the same command with --out {job.out} goes on from it"
        return None, f"what was saved cannot be looked up now; {again}: {error}"
    if not step:
        return 0, "nothing was saved yet: the next start begins again"
    return step, f"saved: step {step}; the same command with --out {job.out} goes on from there"


def _ended_at(summary: Mapping[str, Any]) -> int:
    return int(number(summary, "step") or 0)


def _tell_end(job: Job, *, already: bool = False) -> int:
    """What the run came to. ``STOPPED`` if it ended before its last step."""
    step, saved = _saved(job)
    summary = summary_of(job.out)
    if step is None:
        step = _ended_at(summary)  # which was written once that was saved
    is_short = step < job.last_step
    if is_short or _ended_at(summary) != step:
        at = f"step {job.last_step}" if is_short else "its summary"
        err.print(f"stopped before {at}; {saved}")
        return STOPPED
    if job.json:
        profile = {"profile": profile_of(job.out)} if job.profile else {}
        print_json({"out": str(job.out), **summary, **profile})
    elif job.console != "quiet":
        if already:
            out.print(f"step {job.last_step} was reached before; nothing to do")
        elif job.comm_report:
            print_traffic(job.out)
        if job.profile and not already:
            print_profile(job.out)
        print_summary(job.out, summary, job.checkpoints)
    return 0
