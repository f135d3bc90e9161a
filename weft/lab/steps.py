"""How far a run is, from what it writes while a lab looks on, and how much of their chips its
ranks use, from the processor time that the kernel counts."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from weft.lab.identity import fields_of

_TICKS_S = os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM = 11, 12
"""Fields of a process: ticks in either mode, all threads together."""
_STOPS_S, _MOST_S = 0.001, 0.01
"""In which a process notices that it is to stop, at first and on a busy machine."""

R = TypeVar("R")


class Steps:
    """Follows ``metrics.jsonl``; what it holds before the lab starts does not count."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inode, self._read = self._state()
        self._rest = b""
        self.last = 0
        """The largest step seen so far."""
        self.elapsed_s = 0.0
        """When that was done, by the run's own clock."""

    def look(self) -> int:
        """Read what is new; the largest step so far."""
        inode, size = self._state()
        if inode != self._inode or size < self._read:  # a run that goes on writes the file anew
            self._inode, self._read, self._rest = inode, 0, b""
        if size > self._read:
            with self._file.open("rb") as file:
                file.seek(self._read)
                text = self._rest + file.read()
                self._read = file.tell()
            *lines, self._rest = text.split(b"\n")
            self.last, self.elapsed_s = max(
                [(self.last, self.elapsed_s), *map(_step, lines)], key=lambda seen: seen[0]
            )
        return self.last

    def _state(self) -> tuple[int, int]:
        try:
            stat = self._file.stat()
        except FileNotFoundError:
            return 0, 0
        return stat.st_ino, stat.st_size


def _step(line: bytes) -> tuple[int, float]:
    """Of a line that reports a training step, and when it was done; (0, 0) for any other."""
    try:
        record = json.loads(line)
    except ValueError:
        return 0, 0.0
    is_step = isinstance(record, dict) and "eval_loss" not in record
    step = record.get("step") if is_step else None
    return (step, float(record.get("elapsed_s") or 0)) if isinstance(step, int) else (0, 0.0)


@dataclass(frozen=True, slots=True)
class Moment:
    """When a step was seen to be done."""

    step: int
    now_s: float
    used_s: tuple[float, ...]
    """Processor time of each rank until then; 0 for one that has ended."""


def processor_s(pids: Iterable[int]) -> float:
    """What processes that run have used so far."""
    each = (fields_of(pid) for pid in pids)
    return sum(int(f[_USER]) + int(f[_SYSTEM]) for f in each if f) / _TICKS_S


def stands_still(pids: Iterable[int]) -> bool:
    """All of them are stopped, or have ended."""
    return all(fields_of(pid)[:1] in ([], ["T"], ["t"], ["Z"], ["X"]) for pid in pids)


def hold(
    ranks: Sequence[R],
    processes: Callable[[R], Iterable[int]],
    send: Callable[[R, signal.Signals], None],
) -> None:
    """Stop ranks, and return when no process of any of them does anything.

    One that waits for its turn on a core stops when it has that. One that was stopped with a
    process that it forked (vfork) waits for that, and stops once both have gone on for a while.
    """

    def going() -> list[R]:
        return [rank for rank in ranks if not stands_still(processes(rank))]

    def told(some: Sequence[R], number: signal.Signals) -> None:
        for rank in some:
            send(rank, number)
        time.sleep(wait_s)

    wait_s = _STOPS_S
    while left := going():
        told(left, signal.SIGSTOP)
        if left := going():
            told(left, signal.SIGCONT)
        wait_s = min(2 * wait_s, _MOST_S)


def busy(moments: Sequence[Moment], speeds: Sequence[float], after_step: int) -> tuple[float, ...]:
    """Part of the time after a step in which each rank used all of its chip; () where unknown.

    ``speeds``: the part of a core that each rank has.
    """
    seen = [moment for moment in moments if moment.step >= after_step and all(moment.used_s)]
    if len(seen) < 2:
        return ()
    first, last = seen[0], seen[-1]
    whole = last.now_s - first.now_s
    used = zip(first.used_s, last.used_s, speeds, strict=True)
    return tuple((after - before) / (whole * speed) for before, after, speed in used)
