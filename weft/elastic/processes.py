"""Start the ranks of a job on this machine, watch them, and say which one failed first and why.

Ranks fork from a server process that has imported PyTorch once, so they are up in a tenth of a
second each instead of two.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from weft.comm.address import RankAddress
from weft.comm.errors import CommError
from weft.comm.flight_recorder import (
    cause_of_hang,
    is_first_of_records,
    read_records,
    remove_records,
)
from weft.config.imports import uncollected
from weft.elastic.crew import Crew
from weft.elastic.failure import Epoch, Failure, Moves, RanksFailedError, Recover
from weft.elastic.process import Machines, ThisMachine
from weft.elastic.rank_process import Target, found, redirect
from weft.elastic.signals import Asked
from weft.plan.plan import Plan
from weft.platform.threads import give_up_cores_soon
from weft.train.run_folder import LOGS
from weft.train.stop import signals_held

PRELOADED = ("weft.elastic.preloaded",)
"""Imported once and before ranks fork."""
COMPILER = "torch._dynamo"
"""PyTorch's, which its function that computes activations again imports: 0.9 s of each rank."""


def preloaded(plan: Plan) -> tuple[str, ...]:
    """What the ranks of a plan are to fork with."""
    recomputes = any(stage.recompute != "off" for _, _, stage in plan.stages())
    return (*PRELOADED, COMPILER) if recomputes else PRELOADED


def warm_context(preload: Sequence[str] = PRELOADED) -> ForkServerContext:
    """The process context of a job. Its server begins to import at once; the caller goes on.

    Ctrl-C, SIGTERM and SIGHUP to a whole group do not reach the server: this process passes them on
    to what was forked.
    """
    give_up_cores_soon()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with signals_held():
        forkserver.ensure_running()
    return context


def run_ranks(
    target: Target,
    args: tuple[Any, ...],
    world_size: int,
    *,
    folder: Path,
    context: ForkServerContext | None = None,
    recover: Recover | None = None,
    heartbeat_s: float = 0.0,
    moves: Moves | None = None,
) -> None:
    """Run ``target`` in ``world_size`` processes of this machine until all have ended.

    Args:
        context: What ``warm_context`` returned, if it was called early to save time.

    For the rest see ``run_on``.
    """
    machine = ThisMachine(target, folder, folder / LOGS, context or warm_context())
    run_on(
        machine,
        args,
        world_size,
        folder=folder,
        recover=recover,
        heartbeat_s=heartbeat_s,
        moves=moves,
    )


def run_on(
    machines: Machines,
    args: tuple[Any, ...],
    world_size: int,
    *,
    folder: Path,
    recover: Recover | None = None,
    heartbeat_s: float = 0.0,
    moves: Moves | None = None,
    asked: Asked | None = None,
) -> None:
    """Run the ranks of a job until all have ended.

    Rank 0 keeps the terminal; the others write to ``folder/logs/rank*.log``. No other job may run
    in ``folder`` at the same time. Ctrl-C, SIGTERM or SIGHUP asks the ranks to stop, by SIGTERM,
    and is no failure; a second one ends them at once. If this process is killed, they end by
    themselves.

    Args:
        args: What the processes' target is called with after the address.
        recover: What the job goes on with after ranks were lost; without it, or with any other
            failure, the job is over. The others keep their processes, and the target, which then
            has the keyword ``abort``, is called in them again.
        heartbeat_s: If it may go on, a process that answers nothing for so long is lost; 0: never.
        moves: Says, if it may go on, when all are to go on with something else.
        asked: Counts what asks this process to stop, for whoever wants to know it, too.

    Raises:
        RanksFailedError: a rank failed. The others have been ended.
    """
    logs = folder / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    may_go_on = recover is not None
    crew = Crew(machines, folder, may_go_on=may_go_on, heartbeat_s=heartbeat_s)
    epoch: Epoch | None = Epoch(args, world_size)
    asked = asked or Asked()
    with asked.handlers():
        try:
            while epoch is not None:
                crew.remove_traces()
                remove_records(logs)
                crew.begin(epoch)
                crew.watch(asked, moves)
                came = moves if crew.has_come else None  # before: who is lost later is replaced
                failures = crew.failures()
                epoch = _next(crew, failures, asked, recover, came)
        finally:
            crew.close()
            crew.remove_traces()
    stopped = asked.times > 0 and all(f.cause in ("signal", "peer") for f in failures)
    if failures and not stopped:
        raise RanksFailedError(failures, cause_of_hang(read_records(logs)))


def _next(
    crew: Crew,
    failures: Sequence[Failure],
    asked: Asked,
    recover: Recover | None,
    came: Moves | None,
) -> Epoch | None:
    """What the ranks go on with; None: the job is over. ``came``: they are all there for it."""
    if came is not None and asked.times < 2:
        return came.epoch()  # also where all are to stop: they save first
    if recover is None or asked.times or not crew.can_go_on:
        return None
    epoch = recover(failures)
    return None if asked.times else epoch


def run_rank(target: Target, address: RankAddress, args: tuple[Any, ...], *, folder: Path) -> None:
    """Be one rank of a job that torchrun, srun or another launcher started and watches.

    Ends the process with one line where another rank failed: that rank's error is the one to read.
    """
    logs = folder / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    if address.rank > 0:
        redirect(logs / f"rank{address.rank}.log")
    with uncollected():
        begin = found(target)
    try:
        begin(address, *args)
    except CommError as error:
        sys.stderr.write(f"rank {address.rank} gave up, because another rank did: {error}\n")
        if is_first_of_records(logs, address.rank):
            sys.stderr.write(f"{cause_of_hang(read_records(logs))}\n")
        sys.stderr.flush()
        os._exit(1)
