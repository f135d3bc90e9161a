"""Run one command on a lab's cluster, with its faults, and tell what happened."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from weft.cluster.cluster_file import ClusterFile
from weft.config.errors import STOPPED, ConfigError
from weft.elastic.signals import Asked
from weft.lab.faults import Appointment, Fault, Say
from weft.lab.lab import LOGS, Lab
from weft.lab.ranks import RankProcess
from weft.lab.steps import Moment, Steps
from weft.train.run_folder import write_text

LOOK_S = 0.01
"""How soon a step, the end of a rank or a signal is seen."""
RECORD = "lab.json"
"""In the run folder."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What is asked for."""

    cluster: ClusterFile
    command: tuple[str, ...]
    out: Path
    """The run folder: metrics are read there, logs and ``lab.json`` written."""
    faults: tuple[Fault, ...] = ()
    grace_s: float = 10.0
    """How long ranks may go on after one of them has failed."""
    quiet: bool = False
    """Nothing on standard output: what rank 0 prints goes to standard error."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it."""

    record: dict[str, Any]
    """What ``lab.json`` holds."""
    exit_code: int
    ranks: Sequence[RankProcess]
    missed: Sequence[Fault]
    """Faults whose time never came."""
    was_stopped: bool = False
    """By Ctrl-C or a signal."""
    moments: Sequence[Moment] = ()
    """One for each step that was seen."""


def rehearse(asked: Rehearsal, say: Say) -> Outcome:
    """Build the cluster, run the command on every chip of it, and take the cluster down.

    Ctrl-C, SIGTERM or SIGHUP asks the ranks to stop; a second one ends them.

    Raises:
        ConfigError: something that was asked for cannot be had on this machine, or another lab
            has the run folder.
        RunError: the kernel refused something.
    """
    interrupts = Asked()
    wants_disk = any(fault.verb == "disk" for fault in asked.faults)
    lab = Lab(asked.cluster, disk=asked.out / "checkpoints" if wants_disk else None)
    steps = Steps(asked.out / "metrics.jsonl")
    faults = [Appointment(fault) for fault in asked.faults]
    with _alone_in(asked.out / LOGS), interrupts.handlers(), lab.built():
        _put_away(asked.out)
        lab.start(asked.command, asked.out, quiet=asked.quiet)
        begun = time.monotonic()
        _record(asked, lab, faults, None)
        watch = _Watch(asked, lab, interrupts, say)
        moments = [Moment(0, 0.0, lab.used_s())]
        while not watch.is_over(now_s := time.monotonic() - begun):
            if steps.look() > moments[-1].step:
                moments.append(Moment(steps.last, now_s, lab.used_s()))
            for each in faults:
                each.keep(now_s, steps.last, lab, say, beside=faults)
            time.sleep(LOOK_S)
    lab.look(time.monotonic() - begun)
    code = exit_code(lab.ranks, was_stopped=interrupts.times > 0)
    return Outcome(
        record=_record(asked, lab, faults, code),
        exit_code=code,
        ranks=lab.ranks,
        missed=[each.fault for each in faults if each.happened_s is None],
        was_stopped=interrupts.times > 0,
        moments=moments,
    )


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One lab at a time writes into a run folder, and replaces its disk. Ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        expected = "a run folder in which no other lab runs"
        raise ConfigError("--out", str(folder.parent), expected, "Choose another.") from None
    except OSError:
        pass  # a network file system without locks
    try:
        yield
    finally:
        os.close(handle)


def _put_away(out: Path) -> None:
    """What an earlier lab recorded of this run goes into a folder of its own beside the logs."""
    if not (out / RECORD).exists():
        return
    logs = out / LOGS
    number = next(n for n in count(1) if not (logs / str(n)).exists())
    (logs / str(number)).mkdir()
    for file in (out / RECORD, *(each for each in logs.iterdir() if each.is_file())):
        file.replace(logs / str(number) / file.name)


class _Watch:
    """Looks after the ranks until there is nothing more to wait for."""

    def __init__(self, asked: Rehearsal, lab: Lab, interrupts: Asked, say: Say) -> None:
        self._grace_s = asked.grace_s
        self._lab = lab
        self._interrupts = interrupts
        self._say = say
        self._failed_s: float | None = None
        self._is_stopping = False

    def is_over(self, now_s: float) -> bool:
        """All ranks have ended, or had to be."""
        if self._lab.look(now_s):
            return True
        if all(rank.code is not None or rank.by_fault for rank in self._lab.ranks):
            return True  # one that a fault has stopped for good
        if self._interrupts.times > 1:
            return self._end("asked to stop twice")
        if self._interrupts.times and not self._is_stopping:
            self._is_stopping = True
            self._say(f"{now_s:.1f} s: asking the ranks to stop; once more ends them")
            self._lab.ask_to_stop()
        self._look_for_failures(now_s)
        if self._failed_s is not None and now_s > self._failed_s + self._grace_s:
            return self._end(f"another had failed {self._grace_s:g} s before")
        return False

    def _look_for_failures(self, now_s: float) -> None:
        failed = [rank for rank in self._lab.ranks if rank.code and not rank.by_fault]
        if self._failed_s is None and failed:
            self._failed_s = now_s
            for rank in failed:
                self._say(f"{now_s:.1f} s: rank {rank.rank} {rank.in_words()}")

    def _end(self, why: str) -> bool:
        for rank in self._lab.ranks:
            self._lab.kill_rank(rank.rank, why, by_fault=False)
        return True


def exit_code(ranks: Sequence[RankProcess], *, was_stopped: bool) -> int:
    """Of the job: that of the rank which failed first on its own; 1 where a signal ended it, and 75
    where it was the one that asked all to stop.

    A rank that a fault killed has not failed: 0 where all others ended well.
    """
    failed = [rank for rank in ranks if rank.code != 0 and not rank.by_fault]
    failed.sort(key=lambda rank: (bool(rank.why), rank.ended_s or 0.0, rank.rank))
    if failed and was_stopped and (failed[0].why or failed[0].code == -signal.SIGTERM):
        return STOPPED
    if failed:
        return max(1, failed[0].code or 1)
    return 0 if any(rank.code == 0 for rank in ranks) else 1


def _record(
    asked: Rehearsal, lab: Lab, faults: Sequence[Appointment], code: int | None
) -> dict[str, Any]:
    """Write ``lab.json``: at the start, so that a lab that is killed leaves it, and at the end."""
    ranks = [
        {
            "rank": rank.rank,
            "host": asked.cluster.hosts[host].name,
            "chip": chip.model_dump(),
            "pid": rank.process.pid,
            "code": rank.code,
            "ended_s": rank.ended_s,
            "how": rank.in_words(),
        }
        for rank, (host, chip) in zip(lab.ranks, asked.cluster.by_rank, strict=True)
    ]
    record = {
        "lab": lab.name,
        "cluster": asked.cluster.model_dump(mode="json"),
        "command": list(asked.command),
        "exit_code": code,
        "ranks": ranks,
        "faults": [vars(each) | {"fault": each.fault.text} for each in faults],
    }
    write_text(asked.out / RECORD, json.dumps(record, indent=2))
    return record
