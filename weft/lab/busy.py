"""How much of its chip each rank uses, from the processor time that the kernel counts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS_S = os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM = 11, 12
"""Fields of ``/proc/PID/stat`` after the command: ticks in either mode, all threads together."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When a step was seen to be done."""

    step: int
    now_s: float
    used_s: tuple[float, ...]
    """Processor time of each rank until then; 0 for one that has ended."""


def processor_s(pids: Iterable[int]) -> float:
    """What processes that run have used so far."""
    return sum(_ticks(pid) for pid in pids) / _TICKS_S


def _ticks(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended
        return 0
    fields = text.rpartition(")")[2].split()
    return int(fields[_USER]) + int(fields[_SYSTEM])


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
