"""What a lab calls the things it makes, so that a later command knows whose they are."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from weft.platform.detect import text_of

_NAME = re.compile(r"(weft-lab-(\d+)-(\d+))(?:-.*)?")


@dataclass(frozen=True, slots=True, order=True)
class Identity:
    """The process that a lab belongs to. A number alone will be some other process's one day."""

    pid: int
    started: int
    """Clock ticks from the start of the machine to that of the process."""
    number: int = 0
    """Of the lab, where a process has several."""

    @staticmethod
    def own(number: int = 0) -> Identity:
        """This process."""
        started = _started(os.getpid())
        assert started is not None, "a process that runs has a start"
        return Identity(os.getpid(), started, number)

    @staticmethod
    def of_name(name: str) -> Identity | None:
        """Whose the thing of this name is; None: no lab's."""
        match = _NAME.fullmatch(name)
        return Identity(int(match[2]), int(match[3])) if match else None

    @property
    def name(self) -> str:
        """Begins the name of everything that the lab makes."""
        several = f"-{self.number}" if self.number else ""
        return f"weft-lab-{self.pid}-{self.started}{several}"

    def is_alive(self) -> bool:
        """The lab still runs."""
        return _started(self.pid) == self.started


def fields_of(pid: int) -> list[str]:
    """Of a process, what ``/proc/PID/stat`` holds after the command; empty where it has ended."""
    return text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _started(pid: int) -> int | None:
    fields = fields_of(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None
