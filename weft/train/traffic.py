"""What one training step sends, by collective and by how far it goes: ``--comm-report``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.comm.counters import Count
from weft.comm.members import Link
from weft.train.job import TRAFFIC_FILE
from weft.train.loop import Run, StepRecord
from weft.train.run_folder import write_text


class Traffic:
    """Counts the collectives of training steps, and not those between them.

    ``count`` goes first among the hooks; ``skip`` last, and before training.
    """

    def __init__(self, run: Run) -> None:
        self._comm = run.comm
        self._steps = 0
        self._counts: dict[tuple[str, Link], Count] = {}

    def count(self, _: StepRecord) -> None:
        self._steps += 1
        for key, count in self._comm.counters.take().items():
            self._counts.setdefault(key, Count()).add(count)

    def skip(self, _: StepRecord | None = None) -> None:
        """What was sent so far belongs to no step."""
        self._comm.counters.take()

    @property
    def sent_mb(self) -> float:
        """By this rank in a step, 10^6 bytes."""
        return sum(count.bytes for count in self._counts.values()) / 1e6 / max(self._steps, 1)

    def write(self, folder: Path) -> None:
        """Ask all ranks, and leave the means over steps in the run folder. Collective."""
        everyone = self._comm.gather_json(self._rows(), name="traffic")
        if self._comm.rank == 0:
            rows = [{"rank": rank, **row} for rank, mine in enumerate(everyone) for row in mine]
            text = json.dumps({"steps": self._steps, "per_step": rows}, indent=2)
            write_text(folder / TRAFFIC_FILE, text)

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for (name, link), count in sorted(self._counts.items()):
            row = {"name": name, "link": link, **asdict(count), "peers": sorted(count.peers)}
            for total in ("calls", "messages", "bytes"):
                row[total] /= max(self._steps, 1)
            rows.append(row)
        return rows
