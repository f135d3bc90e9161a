"""Carries out faults when their time has come, and undoes them when it is over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.lab.faults import Fault
from weft.lab.lab import Lab

Say = Callable[[str], None]


@dataclass
class Appointment:
    """One fault and what has become of it."""

    fault: Fault
    happened_s: float | None = None
    """Time from the start of the ranks; None: not yet."""
    after_step: int | None = None
    """The last step that the metrics of the run held then."""
    undone_s: float | None = None

    def is_due(self, now_s: float, step: int) -> bool:
        """Its time has come, and it has not happened."""
        if self.happened_s is not None:
            return False
        if self.fault.step is not None:
            return step >= self.fault.step
        return now_s >= (math.inf if self.fault.at_s is None else self.fault.at_s)

    def is_over(self, now_s: float) -> bool:
        """It has lasted as long as it should, and has not been undone."""
        if self.happened_s is None or self.undone_s is not None or self.fault.for_s is None:
            return False
        return now_s >= self.happened_s + self.fault.for_s


class Appointments:
    """All faults of one job."""

    def __init__(self, faults: Sequence[Fault], lab: Lab, say: Say) -> None:
        self.all = tuple(Appointment(fault) for fault in faults)
        self._lab = lab
        self._say = say

    def keep(self, now_s: float, step: int) -> None:
        """Do and undo what is due."""
        for each in self.all:
            if each.is_over(now_s):
                _undo(each.fault, self._lab)
                each.undone_s = now_s
                self._say(f"{now_s:.1f} s, after step {step}: over: {each.fault.text}")
            elif each.is_due(now_s, step):
                _do(each.fault, self._lab)
                each.happened_s, each.after_step = now_s, step
                self._say(f"{now_s:.1f} s, after step {step}: fault: {each.fault.text}")


def _do(fault: Fault, lab: Lab) -> None:
    match fault:
        case Fault(verb="kill", host=int(host)):
            lab.kill_host(host, fault.text)
        case Fault(verb="kill", rank=int(rank)):
            lab.kill_rank(rank, fault.text, by_fault=True)
        case Fault(verb="stop", rank=int(rank)):
            lab.stop_rank(rank, for_good=fault.text if fault.for_s is None else "")
        case Fault(verb="cut", link=(one, other)):
            lab.cut(one, other)
        case Fault(verb="slow", rank=int(rank), speed=float(speed)):
            lab.set_speed(rank, speed)
        case Fault(verb="disk"):
            lab.fill_disk()
        case _:
            raise AssertionError(f"not a whole fault: {fault}")


def _undo(fault: Fault, lab: Lab) -> None:
    match fault:
        case Fault(verb="stop", rank=int(rank)):
            lab.resume_rank(rank)
        case Fault(verb="cut", link=(one, other)):
            lab.mend(one, other)
        case Fault(verb="slow", rank=int(rank)):
            lab.set_speed(rank, lab.cluster.by_rank[rank][1].speed)
        case Fault(verb="disk"):
            lab.empty_disk()
        case _:
            raise AssertionError(f"nothing undoes {fault}")
