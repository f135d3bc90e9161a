"""How busy a machine is, for measurements that want it for themselves."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
_WORK = (0, 1, 2, 5, 6, 7)
"""Of a line's numbers (proc(5)): user, nice, system, interrupts twice, and what other machines on
the same processor took; not idling and waiting for disks."""


def busy_cores(watched_s: float) -> float:
    """How many cores worked, in the mean; 0 where the system does not say."""
    before = _worked_s()
    time.sleep(watched_s)
    return (_worked_s() - before) / watched_s


def _worked_s() -> float:
    """Of all cores, since the machine started."""
    try:
        first = STAT.read_text().splitlines()[0]
    except OSError:
        return 0.0
    ticks = [int(word) for word in first.split()[1:]]
    return sum(ticks[number] for number in _WORK) / os.sysconf("SC_CLK_TCK")
