"""Trials that take turns in the lab: each does a step, a slice at a time, while the others stand
still. What else the machine does slows all of them alike, and their ratios little."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Self

from weft.cluster.cluster_file import ClusterFile
from weft.config.errors import RunError
from weft.lab.held import METRICS, HeldJob, Place, await_ready
from weft.lab.lab import LOGS
from weft.lab.steps import Moment, busy
from weft.mix.mix import Rates
from weft.planner.problem import Workload
from weft.report.metrics import read_metrics
from weft.train.run_folder import write_text

TURN_S = 1.0
"""A turn has as many steps as take so long, one at least."""
SLICES = 8
"""Parts of a step after which it is another's turn."""
LEAST_SLICE_S = 0.5
RANKS_AT_ONCE = 16
"""That start at the same time: a process of PyTorch has some 300 MB."""
READY_S = 300.0
"""In which a job has to begin to train."""
STUCK_S = 1800.0
"""Of its own time without a step: it will not do one."""
FIRST_OF_ALL = -20
"""How nice the bench is to other processes; ranks have limits of their own."""
REFUSED = 2
"""Exit code of a job whose configuration cannot work."""
QUIETLY = (
    "train.eval_samples=1",
    "train.eval_every=0",
    "train.timeout_s=86400",  # it stands still while others run
    "checkpoint.every=0",
    "checkpoint.minutes=0",
    "checkpoint.to=null",  # nor goes on from what the job itself has saved there
    "recovery.alarm=off",
    "metrics.report=false",
    "metrics.tensorboard=false",
    "compute.threads=1",
)

Say = Callable[[str], None]


@dataclass(eq=False)
class Entry:
    """A trial that runs in the lab."""

    name: str
    """Of the part, or mix."""
    cluster: ClusterFile
    rates: Rates
    job: HeldJob
    folder: Path

    @property
    def step_s(self) -> float | None:
        """Of all its steps, about; None before there was one."""
        last = self.job.moments[-1] if self.job.moments else Moment(0, 0.0, ())
        return last.now_s / last.step if last.step else None

    def note(self, since: Moment, tokens: int) -> None:
        """What it has done since then, or why it ended, is what it reaches."""
        last, rates = self.job.moments[-1] if self.job.moments else since, self.rates
        if (failed := self.job.failed) is not None:
            code = self.job.code(failed)
            if code == REFUSED:
                log = self.folder / LOGS / f"rank{failed}.log"
                where = log if log.exists() else "above"  # where the first rank of a lab prints
                raise RunError(f"the trial {rates.trial.name!r} was refused: see {where}")
            rates.problem = f"rank {failed} {self.job.in_words(failed)}"
            rates.short = failed if self.job.is_short else None
            rates.was_killed = code is not None and code < 0 and not self.job.is_short
            return
        if last.step == since.step:
            rates.problem = f"no step in {STUCK_S:g} s"
            return
        rates.step_s = (last.now_s - since.now_s) / (last.step - since.step)
        rates.values.append(tokens / rates.step_s)
        speeds = [chip.speed for _, chip in self.cluster.by_rank]
        rates.busy = busy(self.job.moments, speeds, after_step=min(1, last.step - 1))
        records, _ = read_metrics(self.folder / METRICS)
        rates.memory_gib = records[-1].memory_gib


class Turns:
    """A context manager: while it lasts, the trials that were begun and not ended are there.

    Args:
        target: Recipe and overrides of ``weft train``.
        out: Where run folders go.
        place_of: Where ranks run, if not in a lab.
    """

    def __init__(
        self,
        work: Workload,
        target: Sequence[str],
        out: Path,
        say: Say,
        place_of: Callable[[ClusterFile], Place] | None = None,
    ) -> None:
        self._work, self._target, self._out, self._say = work, target, out, say
        self._place_of = place_of
        self._stack = ExitStack()
        self.entries: list[Entry] = []
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        self._began_s = time.monotonic()
        with suppress(PermissionError):  # who tells others when to stop must not wait for them
            os.nice(FIRST_OF_ALL)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def used_s(self) -> float:
        """Since the first of it."""
        return time.monotonic() - self._began_s

    def say(self, text: str) -> None:
        """With the time at which it is said."""
        self._say(f"{self.used_s:4.0f} s: {text}")

    def begin(self, entries: Sequence[Entry]) -> None:
        """Start them; each stands still as soon as it is about to train."""
        waiting = list(entries)
        while waiting:
            ranks = accumulate(entry.cluster.world_size for entry in waiting)
            number = max(1, sum(each <= RANKS_AT_ONCE for each in ranks))
            now, waiting = waiting[:number], waiting[number:]
            self.say(f"starting {'; '.join(f'{e.name}: {e.rates.trial.name}' for e in now)}")
            for entry in now:
                self._stack.enter_context(entry.job)
            await_ready([entry.job for entry in now], READY_S)

    def try_once(self, entries: Sequence[Entry]) -> None:
        """Two turns of each, of which the second counts: in the first the slower ranks may still
        be about to train."""
        for _ in range(2):
            for entry in entries:
                entry.rates.values.clear()
            self.turn([entry for entry in entries if not entry.rates.problem])
        for entry in entries:
            self.say(f"{entry.name}: {entry.rates.trial.name}: {_result(entry.rates)}")

    def turn(self, entries: Sequence[Entry]) -> None:
        """Each does a step or more, in slices, and notes how fast that was."""
        since = {e: e.job.moments[-1] for e in entries if not e.job.has_ended}
        goals = {e: begun.step + ceil(TURN_S / (e.step_s or TURN_S)) for e, begun in since.items()}
        waiting, idle_s = list(since), dict.fromkeys(since, 0.0)
        while waiting:
            for entry in tuple(waiting):
                seconds, before = max(LEAST_SLICE_S, (entry.step_s or 0.0) / SLICES), entry.job.step
                is_done = entry.job.run(seconds, goals[entry])
                idle_s[entry] = 0.0 if entry.job.step > before else idle_s[entry] + seconds
                if is_done or idle_s[entry] >= STUCK_S:
                    waiting.remove(entry)
        nothing = Moment(0, 0.0, ())
        for entry in entries:
            entry.note(since.get(entry, nothing), self._work.samples * self._work.seq_len)

    def end(self, entries: Iterable[Entry]) -> None:
        """Those that are not wanted any more."""
        for entry in entries:
            entry.job.__exit__()

    def entry(self, name: str, cluster: ClusterFile, rates: Rates) -> Entry:
        """A trial that is to begin."""
        number = len(self.entries) + 1
        folder = self._out / f"run{number:03}"
        folder.mkdir(parents=True)
        plan_file = folder / "asked-plan.json"
        write_text(plan_file, rates.trial.plan.to_json())
        settings = [f"batch.samples={self._work.samples}", f"plan.file={plan_file}"]
        command = [sys.executable, "-m", "weft", "train", *self._target, *QUIETLY, *settings]
        command += ["--out", str(folder), "--quiet"]
        about = {"of": name, "trial": rates.trial.name, "cluster": cluster.model_dump(mode="json")}
        write_text(folder / "bench.json", json.dumps(about, indent=2))
        places = [] if self._place_of is None else [self._place_of(cluster)]
        job = HeldJob(cluster, command, folder, number, *places)
        entry = Entry(name, cluster, rates, job, folder)
        self.entries.append(entry)
        return entry


def _result(rates: Rates) -> str:
    if rates.problem:
        return f"failed, {rates.problem}"
    return f"{rates.values[-1]:.0f} tokens/s"
