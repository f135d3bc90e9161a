"""Flight recorder: the last collectives of this rank, for the moment when one never ends."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from weft.comm.errors import CommError

Kind = Literal["group", "gather", "send", "receive", "trade"]
COLLECTIVE: tuple[Kind, ...] = ("group", "gather")
"""All ranks of the call take part in the same way. Gathers have communicators of their own."""
KEPT_CALLS = 256
"""A few steps of a deep pipeline."""
T = TypeVar("T")


@dataclass(slots=True)
class Call:
    """One collective, as this rank saw it. Times are of a clock that nobody sets, in seconds; in a
    file since 1970."""

    name: str
    kind: Kind
    ranks: tuple[int, ...]
    """All who take part; for a send, a receive or a trade the other ends."""
    number: int
    """Which call of these ranks it is, from 1: the same on every rank of a group."""
    bytes: int
    step: int
    """Training steps that were done before."""
    started: float
    waiting_since: float | None = None
    """This rank went no further until it ended."""
    ended: float | None = None


class FlightRecorder:
    """The last calls of one rank, and whether it is stuck in one."""

    def __init__(self, rank: int) -> None:
        self.step = 0
        """Training steps done."""
        self.waited = defaultdict[str, float](float)
        """By name of calls, seconds in which the thread that began this went no further until one
        had ended."""
        self._thread = threading.get_ident()
        self._rank = rank
        self._calls: deque[Call] = deque(maxlen=KEPT_CALLS)
        self._numbers: Counter[tuple[Kind, tuple[int, ...]]] = Counter()
        self._waits_in: Call | None = None
        self._file: Path | None = None
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def waited_s(self) -> float:
        """For all of them."""
        return sum(self.waited.values())

    def begin(self, name: str, kind: Kind, ranks: tuple[int, ...], num_bytes: int) -> Call:
        """A call that starts now."""
        self._numbers[kind, ranks] += 1
        number = self._numbers[kind, ranks]
        call = Call(name, kind, ranks, number, num_bytes, self.step, time.monotonic())
        self._calls.append(call)
        return call

    def wait(self, call: Call) -> None:
        """This rank does nothing else until the call has ended."""
        call.waiting_since = time.monotonic()
        self._waits_in = call

    def end(self, call: Call) -> None:
        call.ended = time.monotonic()
        self._waits_in = None
        if call.waiting_since is not None and threading.get_ident() == self._thread:
            self.waited[call.name] += call.ended - call.waiting_since

    def named(self, call: Call, part: Callable[[], T]) -> T:
        """Run one part of a call, and say in an error which one it was and with whom."""
        try:
            return part()
        except RuntimeError as error:
            self.wait(call)
            self.write()
            peers = ", ".join(str(r) for r in call.ranks if r != self._rank)
            text = str(error).splitlines()[0]
            message = f"rank {self._rank}: {call.name} with rank(s) {peers} failed: {text}"
            raise CommError(message) from error

    def keep_in(self, folder: Path, *, patience_s: float) -> None:
        """From now on write the last calls to a file there when something goes wrong.

        A thread looks now and then whether a call has been waited for longer than ``patience_s``,
        so that the files of all ranks that are alive exist before the first one gives up.
        """
        self._file = record_file(folder, self._rank)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.unlink(missing_ok=True)
        self._watcher = threading.Thread(
            target=self._watch, args=(patience_s,), name="flight recorder", daemon=True
        )
        self._watcher.start()

    def close(self) -> None:
        """Look no longer; the file stays as it is."""
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def write(self) -> None:
        """Write the file, if there is a place for it."""
        if self._file is None:
            return
        waits_in, since_1970_s = self._waits_in, time.time() - time.monotonic()

        def told(call: Call) -> dict[str, Any]:
            times = call.started, call.waiting_since, call.ended
            names = "started", "waiting_since", "ended"
            shown = (at if at is None else at + since_1970_s for at in times)
            return asdict(call) | dict(zip(names, shown, strict=True))

        record = {
            "rank": self._rank,
            "step": self.step,
            "time": time.time(),
            "waits_in": None if waits_in is None else told(waits_in),
            "started": [[kind, list(r), n] for (kind, r), n in dict(self._numbers).items()],
            "calls": [told(call) for call in list(self._calls)],
        }
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps(record))
        temporary.replace(self._file)

    def _watch(self, patience_s: float) -> None:
        written: Call | None = None
        while not self._over.wait(patience_s / 4):
            call = self._waits_in
            if call is None or call is written or call.waiting_since is None:
                continue
            if time.monotonic() - call.waiting_since > patience_s:
                self.write()
                written = call


@dataclass(frozen=True, slots=True)
class Stuck:
    """What a rank's file says of the moment when it was written."""

    rank: int
    step: int
    waits_in: Call | None
    started: dict[tuple[str, tuple[int, ...]], int]
    """Calls started so far, by kind and ranks."""


def record_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its last calls."""
    return folder / f"flight-rank{rank}.json"


def remove_records(folder: Path) -> None:
    """Forget what an earlier job left there."""
    for path in folder.glob("flight-rank*"):
        path.unlink(missing_ok=True)


def read_records(folder: Path) -> dict[int, Stuck]:
    """What the ranks of a job left there."""
    found = {}
    for path in sorted(folder.glob("flight-rank*.json")):
        record = json.loads(path.read_text())
        waits_in = record["waits_in"]
        if waits_in is not None:
            waits_in = Call(**{**waits_in, "ranks": tuple(waits_in["ranks"])})
        started = {(kind, tuple(ranks)): n for kind, ranks, n in record["started"]}
        rank = record["rank"]
        found[rank] = Stuck(rank, record["step"], waits_in, started)
    return found


def is_first_of_records(folder: Path, rank: int) -> bool:
    """Of the ranks that left a file there this is the lowest. Reads none of them."""
    names = (path.stem.removeprefix("flight-rank") for path in folder.glob("flight-rank*.json"))
    return rank == min((int(name) for name in names if name.isdecimal()), default=None)


def cause_of_hang(stuck: dict[int, Stuck]) -> str | None:
    """One sentence: who waits in which collective for whom, down to the rank that does not wait.

    None where no rank says that it waits.
    """
    waiting = [rank for rank, one in sorted(stuck.items()) if one.waits_in is not None]
    if not waiting:
        return None
    step = max(one.step for one in stuck.values())
    rank = waiting[0]
    text, told = f"rank {rank}", set()
    while rank in stuck and (call := stuck[rank].waits_in) is not None and rank not in told:
        told.add(rank)
        late = _late(call, rank, stuck)
        also = f" and {len(late) - 1} more" if len(late) > 1 else ""
        text += f" waits in {_call_in_words(call)} for rank {late[0]}{also}"
        rank = late[0]
        if rank in told:
            return f"{text} again: they wait for each other"
        text += ", which"
    if rank in stuck:
        return f"{text} waits for nobody: it has done step {stuck[rank].step} and computes"
    since = f"since step {step}" if step else "since training began"
    return f"{text} has not been heard of {since}"


def _late(call: Call, rank: int, stuck: dict[int, Stuck]) -> Sequence[int]:
    """Whom a call waits for: those that have not started it, as far as can be told."""
    others = [r for r in call.ranks if r != rank]
    unheard = [r for r in others if r not in stuck]
    if unheard:
        return unheard
    behind = [
        r
        for r in others
        if call.kind in COLLECTIVE
        and stuck[r].started.get((call.kind, call.ranks), 0) < call.number
    ]
    return behind or others


def _call_in_words(call: Call) -> str:
    if call.kind in COLLECTIVE:
        return f"'{call.name}' (call {call.number} of ranks {','.join(map(str, call.ranks))})"
    return f"'{call.name}' ({call.kind} {call.number})"
