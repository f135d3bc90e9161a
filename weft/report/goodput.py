"""Goodput: which part of a run's time went into steps that count, and what the rest went into.

Made of ``events.jsonl`` and ``metrics.jsonl`` alone, by arithmetic: the time of a step that counts
is in its line of metrics; what was done again, each start has noted before it dropped those lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from weft.report.events import Event
from weft.report.metrics import StepMetrics
from weft.report.units import duration, percent_or_na

PARTS = {
    "useful_s": "steps that count",
    "startup_s": "start-up",
    "restore_s": "restoring",
    "lost_s": "steps done again",
    "saving_s": "waiting for saves",
    "evaluation_s": "evaluation",
    "between_s": "noticing losses",
    "other_s": "the rest",
}
"""What the time of a run goes into while it runs, in words."""
SAME_S = 1.0
"""Commands of one run begin farther apart than that."""
_LATER = ("restore", "snapshot")
"""Kinds of events that are also told when ranks are at work no more, or not yet."""
STALLS = ("save_begun", "save_finished", "snapshot")
"""Kinds of events that tell how long training waited for them (``stall_s``)."""

BEGINNINGS = ("restart", "move", "rewind")
"""Kinds of events with which another epoch of the same command begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Seconds of a run from the command that it began with to the last that is known of it. All
    but the first add up to it."""

    wall_s: float
    useful_s: float
    """Steps that were not done again later."""
    startup_s: float
    """From a command, or from a restart, to the first step; without ``restore_s``."""
    restore_s: float
    lost_s: float
    """Steps that were done again, because no state after them had been kept."""
    saving_s: float
    """Training waited for a copy or for a checkpoint."""
    evaluation_s: float
    between_s: float
    """From the last sign of ranks that were lost to the restart."""
    away_s: float
    """Nobody ran it: from the end of one command to the beginning of the next."""
    other_s: float
    """Between steps: records, reports, and steps that a failure has cut."""

    @property
    def share(self) -> float | None:
        """Goodput: useful time as a part of all but ``away_s``; None where there is none."""
        at_work = self.wall_s - self.away_s
        return min(self.useful_s / at_work, 1.0) if at_work > 0 else None

    def parts(self) -> dict[str, float]:
        """Of all but ``away_s``, by the names of ``PARTS``."""
        found = asdict(self)
        return {name: found[name] for name in PARTS}

    def to_json(self) -> dict[str, float | None]:
        return {"share": self.share, **asdict(self)}

    @staticmethod
    def from_json(record: object) -> Goodput | None:
        """What ``to_json`` gave; None for anything else."""
        try:
            assert isinstance(record, dict)
            return Goodput(**{field.name: float(record[field.name]) for field in fields(Goodput)})
        except (AssertionError, LookupError, TypeError, ValueError):
            return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A start of a run in time, seconds since the first command."""

    begin_s: float
    """Of the command, or of the restart."""
    start_s: float
    """Of the first step."""
    last_s: float
    """The last sign of its ranks."""
    over_s: float
    """The last of whoever watched them."""
    is_restart: bool
    """Of the command that began the one before, too."""


def goodput_in_words(found: Goodput) -> str:
    """``goodput 87% of 2m10s: start-up 9.1%, evaluation 3.2%``; what is small is left out."""
    if found.share is None:
        return "goodput is not known"
    at_work = found.wall_s - found.away_s
    lost = {name: took / at_work for name, took in found.parts().items() if name != "useful_s"}
    large = sorted(lost.items(), key=lambda item: -item[1])
    said = ", ".join(f"{PARTS[name]} {percent_or_na(part)}" for name, part in large if part > 0.005)
    away = f"; nobody ran it for {duration(found.away_s)}" if found.away_s >= 1 else ""
    first = f"goodput {percent_or_na(found.share)} of {duration(at_work)}"
    return f"{first}{f': {said}' if said else ''}{away}"


def goodput(events: Sequence[Event], steps: Sequence[StepMetrics]) -> Goodput | None:
    """Of a run, from what it has written so far; None where no start is recorded."""
    found = spans(events, steps)
    if not found:
        return None
    gaps = [
        (max(after.begin_s - before.over_s, 0.0), after.is_restart)
        for before, after in pairwise(found)
    ]
    watched_s = sum(span.over_s - span.last_s for span in found)
    restore_s = _sum(events, "seconds", "restore")
    wall_s = max(span.over_s for span in found)
    parts = {
        "useful_s": sum(m.step_time_s for m in steps if math.isfinite(m.step_time_s)),
        "startup_s": max(sum(span.start_s - span.begin_s for span in found) - restore_s, 0.0),
        "restore_s": restore_s,
        "lost_s": _sum(events, "lost_s", "start"),
        "saving_s": _sum(events, "stall_s", *STALLS),
        "evaluation_s": _sum(events, "seconds", "evaluation"),
        "between_s": watched_s + sum(gap for gap, is_restart in gaps if is_restart),
        "away_s": sum(gap for gap, is_restart in gaps if not is_restart),
    }
    return Goodput(wall_s=wall_s, other_s=max(wall_s - sum(parts.values()), 0.0), **parts)


def spans(events: Sequence[Event], steps: Sequence[StepMetrics]) -> list[Span]:
    """The starts of a run, one after another; none where no step ever began."""
    places = [at for at, event in enumerate(events) if event.kind == "start"]
    found = _failed(events[: places[0]], events[places[0]]) if places else []
    for at, until in pairwise([*places, len(events)]):
        start, here = events[at], events[at + 1 : until]
        after = events[until] if until < len(events) else None
        begin_s, is_restart = _began(start, events[:at])
        failed = _failed(here, start, *([] if after is None else [after]))
        next_s = math.inf if after is None else _began(after, events[:until])[0]
        end_s = min([next_s, *(span.begin_s for span in failed)])
        last_s = min(max(_signs(start, here, after, steps)), end_s)
        watched = (e.elapsed_s for e in here if _is_watchers(e) and e.elapsed_s <= end_s)
        found.append(
            Span(
                begin_s=min(begin_s, start.elapsed_s),
                start_s=start.elapsed_s,
                last_s=last_s,
                over_s=max([last_s, *watched]),
                is_restart=is_restart,
            )
        )
        found += failed
    return found


def left_by(metrics: Path, first_step: int) -> dict[str, float]:
    """What a start finds of the one before it, as facts of its event.

    ``last_step`` and ``last_s``: the last step that is recorded, and when it had ended since that
    start. ``lost_steps`` and ``lost_s``: those after ``first_step``, to be done again.
    """
    rows = list(_from_the_end(metrics, first_step))
    last, lost = rows[0] if rows else {}, [row for row in rows if row["step"] > first_step]
    return {
        "last_step": last.get("step", 0),
        "last_s": _seconds(last, "elapsed_s"),
        "lost_steps": len(lost),
        "lost_s": sum(_seconds(row, "step_time_s") for row in lost),
    }


def _began(start: Event, before: Sequence[Event]) -> tuple[float, bool]:
    """When a start began, and whether it was a restart within its command."""
    command_s = _command_s(start)
    since = max((at for at, event in enumerate(before) if event.kind == "start"), default=-1)
    here = [e for e in before[since + 1 :] if e.elapsed_s >= command_s]
    restarts = [e.elapsed_s for e in here if e.kind in BEGINNINGS]
    # Ranks that come, or none of that.
    others = [e.elapsed_s for e in here if e.kind in ("replan", "balance")]
    restart_s = restarts[0] if restarts else others[-1] if others else None
    if restart_s is None or since < 0 or not _is_of(before[since], start):
        return max(command_s, 0.0), False
    return restart_s, True


def _failed(here: Sequence[Event], *starts: Event) -> list[Span]:
    """Commands of which no step began, as those that watched them told among ``here``; all else of
    that is of ``starts``."""
    found: list[Span] = []
    last: Event | None = None
    for event in here:
        if "since_began_s" not in event.facts or any(_is_of(event, each) for each in starts):
            continue
        begin_s, over_s = max(_command_s(event), 0.0), event.elapsed_s
        if last is not None and _is_of(event, last):
            begin_s = found.pop().begin_s
        last = event
        found.append(
            Span(begin_s=begin_s, start_s=over_s, last_s=over_s, over_s=over_s, is_restart=False)
        )
    return found


def _command_s(event: Event) -> float:
    """When the command of a start, or of whoever watched it, began."""
    return event.elapsed_s - event.seconds("startup_s") - event.seconds("since_began_s")


def _is_of(event: Event, other: Event) -> bool:
    """Both are of one command."""
    return abs(_command_s(event) - _command_s(other)) < SAME_S


def _signs(
    start: Event, here: Sequence[Event], after: Event | None, steps: Sequence[StepMetrics]
) -> Iterator[float]:
    """When the ranks of a start were at work for certain; ``here``: events until the next."""
    first = start.step or 0
    yield start.elapsed_s
    yield from (e.elapsed_s for e in here if not (_is_watchers(e) or e.kind in _LATER))
    if after is None:
        rows = (m.elapsed_s for m in steps if m.step > first and math.isfinite(m.elapsed_s))
        yield start.elapsed_s + max(rows, default=0.0)
    elif after.seconds("last_step") > first:
        yield start.elapsed_s + after.seconds("last_s")


def _is_watchers(event: Event) -> bool:
    """It was told by the process that started the ranks."""
    is_failure = event.kind == "end" and "cause" in event.facts
    return is_failure or event.kind in ("epoch_end", "restart", "replan", "move")


def _sum(events: Sequence[Event], fact: str, *kinds: str) -> float:
    return sum(event.seconds(fact) for event in events if event.kind in kinds)


def _from_the_end(metrics: Path, first_step: int) -> Iterator[dict[str, Any]]:
    """Lines of steps, the last first, down to ``first_step``; those that are none are left out."""
    try:
        lines = metrics.read_bytes().split(b"\n")
    except OSError:
        return
    for line in reversed(lines):
        row: object = None
        with suppress(ValueError):
            row = json.loads(line)
        if not (isinstance(row, dict) and isinstance(row.get("step"), int) and "loss" in row):
            continue
        yield row
        if row["step"] <= first_step:
            return


def _seconds(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0
