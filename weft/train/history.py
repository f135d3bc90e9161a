"""What a run has to know of its steps, besides its tensors, to go on as if it had never stopped.

A checkpoint holds it. Where a run went back because of what it met in a batch, the run's folder
names that batch before anything else happens, and the first that was left out with it before any
step that follows: whoever begins again, however often it is killed on the way and from whichever
checkpoint, leaves out the same ones.
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


@dataclass(frozen=True, slots=True)
class Rewind:
    """What a run left out as it went back once; in its folder ``[first, bad]``, or ``bad``."""

    bad: int
    """The batch that it met; there is no step that reads it."""
    first: int | None = None
    """None: nobody has gone on since, so where training goes on decides."""

    @staticmethod
    def of(entry: Any) -> Rewind:
        """Raises ValueError or TypeError where it is none."""
        first, bad = entry if isinstance(entry, list) else (None, entry)
        for each in (bad,) if first is None else (first, bad):
            if not isinstance(each, int) or isinstance(each, bool) or each < 0:
                raise ValueError(f"{entry!r}")
        if first is not None and first > bad:
            raise ValueError(f"{entry!r}")
        return Rewind(bad, first)

    @property
    def entry(self) -> JSON:
        return self.bad if self.first is None else [self.first, self.bad]


@dataclass(frozen=True)
class History:
    """Of a run until now. What it left out and why is fixed as long as it does not go back."""

    spikes: Spikes = field(default_factory=lambda: Spikes(0, 1.0))
    """The last losses."""
    left_out: LeftOut = field(default_factory=LeftOut)
    rewinds: tuple[Rewind, ...] = ()
    """In their order."""

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
            "rewinds": [each.bad for each in self.rewinds],
        }


def history_of(
    state: Mapping[str, Any], step: int, noted: Sequence[Rewind], config: RecoveryConfig
) -> History:
    """Of a run that goes on after ``step``.

    Args:
        state: Of the checkpoint, as ``History.state`` gave it; empty for a new run.
        noted: How the run went back, as its folder has it.
    """
    settled = [(each.first, each.bad) for each in noted if each.first is not None]
    left_out = LeftOut.of([*state.get("left_out", ()), *settled])
    known = dict.fromkeys([*state.get("rewinds", ()), *(each.bad for each in noted)])
    begin, bad = left_out.batch(step), max((e.bad for e in noted if e.first is None), default=-1)
    if bad >= begin:
        left_out = left_out.and_also(begin, bad)
    firsts: dict[int, int | None] = {bad: first for first, bad in settled}
    for each in known:
        if each not in firsts:
            found = (first for first, last in left_out.ranges if first <= each <= last)
            firsts[each] = begin if begin <= each <= bad else next(found, None)
    rewinds = tuple(Rewind(each, firsts[each]) for each in known)
    window = 0 if config.when_spike == "ignore" else config.spike_window
    losses, is_high = state.get("losses", ()), bool(state.get("is_high", False))
    spikes = Spikes(window, config.spike_limit, losses, is_high=is_high)
    return History(spikes, left_out, rewinds)


def read_rewinds(out: Path) -> tuple[Rewind, ...]:
    """How a run went back, in its order.

    Raises:
        RunError: the file holds something else.
    """
    file = out / REWINDS_FILE
    try:
        return tuple(Rewind.of(each) for each in json.loads(file.read_text()))
    except FileNotFoundError:
        return ()
    except (ValueError, TypeError) as error:
        hint = "Write there the `batch` of each event of kind rewind in events.jsonl, as in [7, 12]"
        raise RunError(f"{file} is no list of batches: {error}. {hint}") from error


def note_rewinds(out: Path, rewinds: Sequence[Rewind]) -> None:
    """Before the run goes back, and once it is known where it goes on. Nothing that is killed
    leaves half of it."""
    text = json.dumps([each.entry for each in rewinds])
    write_text(out / REWINDS_FILE, f"{text}\n")
