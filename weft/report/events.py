"""What happened to a run, as it happened: ``events.jsonl`` in its folder, one JSON object a line.

Several processes write: the one that started the ranks, and the first rank of each start. Each adds
whole lines at the end, so none overwrites another's; a line that a crash has cut is passed over.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

EVENTS_FILE = "events.jsonl"
_TAIL = 1 << 16
"""Bytes at the end of a file, in which its last event is."""

Kind = Literal[
    "start",
    "restore",
    "epoch_end",
    "restart",
    "replan",
    "move",
    "save_begun",
    "save_finished",
    "save_failed",
    "save_skipped",
    "snapshot",
    "evaluation",
    "stop_asked",
    "not_finite",
    "spike",
    "rewind",
    "straggler",
    "drift",
    "balance",
    "end",
]
"""``start``: the first step of an epoch begins. ``epoch_end``: ranks were lost, and with them the
epoch of the job; ``restart``: another one begins; ``replan``: under which other plan, or why not.
``move``: the ranks have left for another plan, as somebody asked; ``rewind``: they go on from
before a step, without the batches that led to it. ``balance``: pipelines have other shares of a
batch from then on. ``snapshot``: copies in memory alone, of the last minute together."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line."""

    time: str
    """When it was written, ISO 8601 in UTC."""
    elapsed_s: float
    """Wall time since the command that the run began with."""
    kind: str
    """A ``Kind``; a newer Weft may write others."""
    step: int | None = None
    """Optimizer steps done by then."""
    rank: int | None = None
    """Of whom it tells; None: of all."""
    message: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More, by the kind."""

    def seconds(self, fact: str) -> float:
        """A fact that is a time; 0 where it is not there."""
        value = self.facts.get(fact)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return max(float(value), 0.0) if is_number and value is not None else 0.0


class EventLog:
    """Writes events of a run.

    Nothing is lost by a process that ends, and nobody ends because a line cannot be written. A
    clock that is set meanwhile is not followed, and none goes back to before what is written.

    Args:
        folder: The run's; None: of a rank that does not speak for the job, which writes nothing.
        began: When this command began, seconds since 1970.
        watches: It is of the process that started the ranks, whose events say of which command they
            are: that may have ended before its first step.
    """

    def __init__(
        self, folder: Path | None = None, *, began: float | None = None, watches: bool = False
    ) -> None:
        self._watches = watches
        self._path = None if folder is None else folder / EVENTS_FILE
        self._ahead_s = time.time() - time.monotonic()
        self._began = self._now() if began is None else began
        self._zero: float | None = None

    @property
    def since_began_s(self) -> float:
        """Since this command began."""
        return max(self._now() - self._began, 0.0)

    def _now(self) -> float:
        return time.monotonic() + self._ahead_s

    def write(
        self,
        kind: Kind,
        message: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        """Add a line; it is on its way to the disk before the call returns."""
        if self._path is None:
            return
        more = {"since_began_s": self.since_began_s} if self._watches else {}
        known = {name: _json(value) for name, value in {**(facts or {}), **more}.items()}
        event = Event(
            time="", elapsed_s=0.0, kind=kind, step=step, rank=rank, message=message, facts=known
        )
        with suppress(OSError):
            self._add(self._path, event)

    def _add(self, path: Path, event: Event) -> None:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            now, size = self._now(), os.fstat(file).st_size
            if self._zero is None:
                first = _zero(path) if size else None
                self._zero = self._began if first is None else min(first, now - _last_s(path))
            line = json.dumps(asdict(replace(event, time=_iso(now), elapsed_s=now - self._zero)))
            is_cut = size and os.pread(file, 1, size - 1) != b"\n"
            os.write(file, f"{line}\n".encode() if not is_cut else f"\n{line}\n".encode())
        finally:
            os.close(file)


def read_events(path: Path) -> list[Event]:
    """What was written, in its order; empty where there is no such file. A line that is no event
    is passed over: a crash may have cut it."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [event for line in text.split("\n") if (event := _parsed(line)) is not None]


def _parsed(line: str) -> Event | None:
    try:
        record = json.loads(line)
        facts = record["facts"]
        return Event(
            time=str(record["time"]),
            elapsed_s=float(record["elapsed_s"]),
            kind=str(record["kind"]),
            step=_whole(record["step"]),
            rank=_whole(record["rank"]),
            message=str(record["message"]),
            facts=facts if isinstance(facts, dict) else {},
        )
    except (ValueError, TypeError, LookupError):
        return None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _json(value: object) -> object:
    """JSON has no infinities and no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _zero(path: Path) -> float | None:
    """Where ``elapsed_s`` counts from, by the first event; None: there is none."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first = next((event for line in file if (event := _parsed(line)) is not None), None)
    if first is None:
        return None
    return datetime.fromisoformat(first.time).timestamp() - first.elapsed_s


def _last_s(path: Path) -> float:
    """Seconds of the last event, if it is near the end; 0 where there is none."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        lines = file.read().decode(errors="replace").split("\n")
    return next((event.elapsed_s for line in lines[::-1] if (event := _parsed(line))), 0.0)


def _iso(seconds: float) -> str:
    """``2026-11-21T06:39:00.123Z``."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
