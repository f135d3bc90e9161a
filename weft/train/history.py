"""What a run has to know of its steps, besides its tensors, to go on as if it had never stopped.

A checkpoint holds it. Where a run went back because of what it met in a batch, the run's folder
names that batch before anything else happens: whoever begins again, however often it is killed on
the way, leaves out the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.checkpoint.entry import JSON
from weft.config.errors import RunError
from weft.config.sections import RecoveryConfig
from weft.data.left_out import LeftOut
from weft.train.run_folder import REWINDS_FILE, write_text
from weft.train.spikes import Spikes


@dataclass(frozen=True)
class History:
    """Of a run until now. What it left out and why is fixed as long as it does not go back."""

    spikes: Spikes = field(default_factory=lambda: Spikes(0, 1.0))
    """The last losses."""
    left_out: LeftOut = field(default_factory=LeftOut)
    rewinds: tuple[int, ...] = ()
    """The batches at which it went back; there is no step that reads them."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know at a start."""
        if not self.left_out.ranges:
            return ()
        ranges = (f"{a}" if a == b else f"{a} to {b}" for a, b in self.left_out.ranges)
        return (f"left out, as the run went back: batches {', '.join(ranges)}",)

    def state(self) -> dict[str, JSON]:
        """For a checkpoint."""
        return {
            "losses": list(self.spikes.losses),
            "is_high": self.spikes.is_high,
            "left_out": [list(each) for each in self.left_out.ranges],
            "rewinds": list(self.rewinds),
        }


def history_of(
    state: Mapping[str, Any], step: int, rewinds: Sequence[int], config: RecoveryConfig
) -> History:
    """Of a run that goes on after ``step``.

    Args:
        state: Of the checkpoint, as ``History.state`` gave it; empty for a new run.
        rewinds: The batches at which the run went back, as its folder has them.
    """
    left_out = LeftOut.of(state.get("left_out", ()))
    known = dict.fromkeys([*state.get("rewinds", ()), *rewinds])
    begin, bad = left_out.batch(step), max(known, default=-1)
    if bad >= begin:
        left_out = left_out.and_also(begin, bad)
    window = 0 if config.when_spike == "ignore" else config.spike_window
    losses, is_high = state.get("losses", ()), bool(state.get("is_high", False))
    spikes = Spikes(window, config.spike_limit, losses, is_high=is_high)
    return History(spikes, left_out, tuple(known))


def read_rewinds(out: Path) -> tuple[int, ...]:
    """The batches at which a run went back, in the order in which it met them.

    Raises:
        RunError: the file holds something else.
    """
    file = out / REWINDS_FILE
    try:
        return tuple(int(each) for each in json.loads(file.read_text()))
    except FileNotFoundError:
        return ()
    except (ValueError, TypeError) as error:
        hint = "Write there the `batch` of each event of kind rewind in events.jsonl, as in [7, 12]"
        raise RunError(f"{file} is no list of batches: {error}. {hint}") from error


def note_rewind(out: Path, rewinds: tuple[int, ...]) -> None:
    """Before the run goes back. Nothing that is killed leaves half of it."""
    write_text(out / REWINDS_FILE, f"{json.dumps(rewinds)}\n")
