"""``--profile``: a trace of two steps of every rank, and how long each rank waited for others."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from weft.comm.spans import WAIT, switch
from weft.train.job import PROFILE_FOLDER
from weft.train.loop import Run, StepRecord
from weft.train.run_folder import write_text

FIRST = 2
"""Steps before it: they compile, connect and allocate."""
STEPS = 2


class Profile:
    """Traces steps ``FIRST + 1`` and ``FIRST + 2`` of a start, or the last ones of a shorter run.

    ``begin`` goes last among the hooks, ``end`` first; nothing happens unless ``asked``. Chrome's
    trace format, which Perfetto opens.
    """

    def __init__(self, run: Run, folder: Path, *, asked: bool) -> None:
        self._run = run
        self._asked = asked
        self._folder = folder / PROFILE_FOLDER
        last = run.last_step - run.first_step
        self._first = run.first_step + min(FIRST, max(last - STEPS, 1))
        self._last = min(self._first + STEPS, run.last_step)
        self._profiler: Any = None
        self._began = 0.0

    def begin(self, record: StepRecord) -> None:
        """Start where the step that follows is to be traced."""
        if not self._asked or record.step != self._first or record.step == self._last:
            return
        from torch.profiler import profile

        self._profiler = profile()
        self._profiler.start()
        switch(on=True)
        self._began = time.perf_counter()

    def end(self, record: StepRecord) -> None:
        """Write the trace once its last step is done. Collective."""
        if self._profiler is None or record.step != self._last:
            return
        self._run.platform.synchronize()
        seconds = time.perf_counter() - self._began
        switch(on=False)
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        rank, steps = self._run.comm.rank, self._last - self._first
        name = f"rank{rank}.json.gz"
        self._profiler.export_chrome_trace(str(self._folder / name))
        waits = waited_s(self._profiler.events())
        row = {
            "rank": rank,
            "file": name,
            "step_s": seconds / steps,
            "waits_s": {name: total / steps for name, total in sorted(waits.items())},
        }
        everyone = self._run.comm.gather_json(row, name="profile")
        self._profiler = None
        if self._run.is_main:
            record_of = {"steps": [self._first + 1, self._last], "ranks": everyone}
            write_text(self._folder / "summary.json", json.dumps(record_of, indent=2))


def waited_s(events: Any) -> dict[str, float]:
    """By what for, the time in which a rank's thread waited for others.

    Waits inside another one count once, for the outer.
    """
    found: Counter[str] = Counter()
    inside = -1.0
    waits = (event for event in events if event.name.startswith(WAIT))
    for event in sorted(waits, key=lambda each: each.time_range.start):
        if event.time_range.start < inside:
            continue
        inside = event.time_range.end
        found[event.name.removeprefix(WAIT)] += event.time_range.elapsed_us() / 1e6
    return dict(found)
