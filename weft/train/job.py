"""What a command hands to every rank of a training run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weft.checkpoint.place import Place, checkpoints_at
from weft.checkpoint.remote.owner import Owner
from weft.config.sections import Config
from weft.plan.plan import Plan
from weft.report.progress import Mode
from weft.resolve.peaks import Peak
from weft.resolve.prediction import Prediction
from weft.train.run_folder import LOGS

TRAFFIC_FILE = "comm.json"
"""In the run folder, with ``--comm-report``: what a step sent."""
PROFILE_FOLDER = "profile"
"""In the run folder, with ``--profile``: a trace of each rank, and what they waited for."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run, resolved: nothing is left to guess."""

    config: Config
    plan: Plan
    out: Path
    """The run folder; every machine of the job sees the same one."""
    last_step: int
    """Stop after this many steps in all."""
    threads: int
    """CPU threads of each rank."""
    cards: tuple[int, ...] = ()
    """For each rank, which of its machine's devices of its family it has; empty: they are given out
    in the order of ranks."""
    console: Mode = "plain"
    """How rank 0 shows progress."""
    json: bool = False
    """Keep standard output free for the result: show progress on standard error."""
    comm_report: bool = False
    """Count what training steps send, and leave the table in the run folder."""
    profile: bool = False
    """Trace two steps of every rank, and leave the traces in the run folder."""
    prediction: Prediction | None = None
    """What the run is expected to take; None: nobody asked."""
    peaks: Mapping[int, Peak] = field(default_factory=dict)
    """Of the ranks on this machine, what MFU is measured against; of others nothing is known."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name -> text of the files that say what this run is. Rank 0 writes them into the run folder
    once data and checkpoint are accepted: what is refused changes nothing there."""

    began: float = field(default_factory=time.time)
    """When the command began, seconds since 1970."""
    owner: Owner = field(default_factory=Owner)
    """The command, as storage far away knows it."""

    @property
    def checkpoints(self) -> Place:
        """Where they lie. Raises ConfigError for an address that cannot be opened."""
        return checkpoints_at(self.config.checkpoint.to, self.out)

    @property
    def held(self) -> Path:
        """The folder that whoever writes checkpoints holds as long as he does."""
        place = self.checkpoints
        return place if isinstance(place, Path) else self.out / LOGS
