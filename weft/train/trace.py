"""What a trace says of one rank: when it computed, when only messages moved, when nothing ran.

Read from Chrome's trace format as PyTorch's profiler writes it, in microseconds. Where the trace
has kernels of a device, they say when it worked, and for whom the host waited. Without any, the
host computes: its operations say when, and its waits for others are its communication.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from weft.comm.spans import CALL, WAIT

TRACED = "traced steps"
"""The span around all that is looked at."""
POINTS = 200
"""Of the line that memory draws over time, at most."""
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_MEMORY = "[memory]"

Stretch = tuple[float, float]
"""From, to."""


class Span(NamedTuple):
    """A named part of a thread's time."""

    start: float
    end: float
    name: str


def union(stretches: Iterable[Stretch]) -> list[Stretch]:
    """In order, none touching another."""
    found: list[Stretch] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def outside(stretches: Sequence[Stretch], others: Sequence[Stretch]) -> list[Stretch]:
    """What lies in none of the others; both are unions."""
    found: list[Stretch] = []
    at = 0
    for first, end in stretches:
        start = first
        while at < len(others) and others[at][1] <= start:
            at += 1
        for low, high in others[at:]:
            if low >= end:
                break
            if low > start:
                found.append((start, low))
            start = max(start, high)
        if start < end:
            found.append((start, end))
    return found


def inside(stretches: Sequence[Stretch], others: Sequence[Stretch]) -> list[Stretch]:
    """What lies in both; both are unions."""
    return outside(stretches, outside(stretches, others))


def length_s(stretches: Iterable[Stretch]) -> float:
    """Of a union."""
    return sum(end - start for start, end in stretches) / 1e6


class _Thread:
    """The spans of one thread; each lies in another one or beside it."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: (span.start, -span.end))
        self._starts = [span.start for span in self.spans]
        self._parents: list[int] = []
        open_: list[int] = []
        for number, span in enumerate(self.spans):
            while open_ and self.spans[open_[-1]].end <= span.start:
                open_.pop()
            self._parents.append(open_[-1] if open_ else -1)
            open_.append(number)

    def around(self, time: float) -> Iterator[str]:
        """Names of the spans at this time, the outermost last."""
        at = bisect_right(self._starts, time) - 1
        while at >= 0:
            if self.spans[at].end >= time:
                yield self.spans[at].name
            at = self._parents[at]


class Trace:
    """The events of one rank.

    Args:
        is_collective: A kernel of this name belongs to the device's library of collectives.
    """

    def __init__(
        self, events: Sequence[Mapping[str, Any]], is_collective: Callable[[str], bool]
    ) -> None:
        self._is_collective = is_collective
        self._device: list[Mapping[str, Any]] = []
        self._issued: dict[object, tuple[object, float]] = {}
        self._host_waits: list[Span] = []
        self._operations: defaultdict[object, list[Stretch]] = defaultdict(list)
        self._memory: list[Mapping[str, Any]] = []
        self.window: Stretch = (0.0, 0.0)
        self._main: object = None
        spans: defaultdict[object, list[Span]] = defaultdict(list)
        for event in events:
            kind = event.get("cat", "")
            if event.get("name") == _MEMORY:
                self._memory.append(event)
            elif event.get("ph") == "X" and kind in _ON_DEVICE:
                self._device.append(event)
            elif event.get("ph") == "X":
                start = float(event["ts"])
                span = Span(start, start + float(event.get("dur", 0.0)), event["name"])
                self._take(kind, span, event, spans[event["tid"]])
        self._threads = {thread: _Thread(found) for thread, found in spans.items()}
        self._memory.sort(key=lambda event: float(event["ts"]))

    def _take(self, kind: str, span: Span, event: Mapping[str, Any], spans: list[Span]) -> None:
        """Something that a thread of the host did."""
        thread = event["tid"]
        if kind == "user_annotation" and span.name == TRACED:
            self.window, self._main = span[:2], thread
        elif kind == "user_annotation" and not _is_foreign(span.name):
            spans.append(span)
        elif kind == "cpu_op" and not span.name.startswith("c10d::"):
            self._operations[thread].append(span[:2])
        elif kind.endswith(("_runtime", "_driver")):
            self._issued[event.get("args", {}).get("correlation")] = (thread, span.start)
            if span.name.endswith("Synchronize"):
                self._host_waits.append(span)

    def _around(self, thread: object, time: float) -> list[str]:
        """The names around a time, innermost first; the engine's own threads compute for the main
        one, which waits meanwhile."""
        threads = dict.fromkeys((thread, self._main))
        known = [self._threads[each] for each in threads if each in self._threads]
        return [name for each in known for name in each.around(time)]

    def waits(self) -> list[Span]:
        """In which a thread waited for other ranks, without the name's beginning.

        Waits inside another one count once, for the outer.
        """
        found = []
        for thread in self._threads.values():
            until = -1.0
            for span in thread.spans:
                if span.name.startswith(WAIT) and span.start >= until:
                    until = span.end
                    found.append(span._replace(name=span.name.removeprefix(WAIT)))
        return found

    def summary(self, steps: int) -> dict[str, Any]:
        """Seconds of one step: where they went, and by name."""
        of_device, waits = bool(self._device), self.waits()
        computing, talking = self._on_device() if of_device else self._on_host(waits)
        window = [self.window]
        busy = inside(union(chain.from_iterable(computing.values())), window)
        moving = inside(union(chain.from_iterable(talking.values())), window)
        exposed = outside(moving, busy)
        hosts = _by_name([*waits, *self._other_host_waits(waits)] if of_device else [])
        waited = inside(union(chain.from_iterable(hosts.values())), window)
        waited = outside(waited, union([*busy, *moving]))
        idle = outside(outside(window, union([*busy, *moving])), waited)
        parts = {"computing": (busy, computing), "exposed communication": (exposed, talking)}
        parts |= {"host waits": (waited, hosts), "idle": (idle, {})}
        names = [
            {"part": part, "name": name, "s": length_s(inside(found, whole)) / steps}
            for part, (whole, by_name) in parts.items()
            for name, found in by_name.items()
        ]
        return {
            "step_s": length_s(window) / steps,
            "from": "kernels" if of_device else "operations",
            "parts_s": {name: length_s(part) / steps for name, (part, _) in parts.items()},
            "communicating_s": length_s(moving) / steps,
            "names": [row for row in names if row["s"]],
            "waits_s": {n: length_s(s) / steps for n, s in sorted(_by_name(waits).items())},
        }

    def _other_host_waits(self, waits: Sequence[Span]) -> list[Span]:
        """Calls that wait for the device, but for those in which a wait for others does."""
        told = union(span[:2] for span in waits)
        return [span for span in self._host_waits if outside([span[:2]], told)]

    def _on_device(self) -> tuple[dict[str, list[Stretch]], dict[str, list[Stretch]]]:
        """What computed, by what the host was at; what communicated, by collective."""
        computing, talking = defaultdict(list), defaultdict(list)
        for event in self._device:
            start = float(event["ts"])
            thread, issued = self._issued.get(
                event.get("args", {}).get("correlation"), (self._main, start)
            )
            names = self._around(thread, issued)
            calls = [name for name in names if name.startswith((CALL, WAIT))]
            is_kernel = self._is_collective(event["name"])
            stretch = (start, start + float(event.get("dur", 0.0)))
            if is_kernel or (calls and event["cat"] == "gpu_memcpy"):
                name = calls[-1].partition(": ")[2] if calls else event["name"].partition("(")[0]
                talking[name].append(stretch)
            else:
                computing[_action(names)].append(stretch)
        return _unions(computing), _unions(talking)

    def _on_host(
        self, waits: Sequence[Span]
    ) -> tuple[dict[str, list[Stretch]], dict[str, list[Stretch]]]:
        """The same where the host itself computes."""
        names: dict[str, list[Stretch]] = defaultdict(list)
        for thread, operations in self._operations.items():
            spans = self._threads[thread].spans if thread in self._threads else []
            waiting = union(span[:2] for span in spans if span.name.startswith(WAIT))
            rest = outside(union(operations), waiting)
            actions = [span for span in spans if not span.name.startswith((CALL, WAIT))]
            by_action = _by_name(span._replace(name=_action([span.name])) for span in actions)
            for name, stretches in by_action.items():
                names[name] += inside(rest, stretches)
            acting = union(span[:2] for span in actions)
            names[_action([])] += outside(rest, acting)
        return _unions(names), _by_name(waits)

    def memory(
        self, kept: Mapping[str, Mapping[int, int]], *, still: Container[int], is_host: bool
    ) -> dict[str, Any]:
        """Bytes that tensors take: at most, in each kind of action, and over time.

        Args:
            kept: Address and bytes of what lies there when the first step begins, by what it is
                for.
            still: Addresses that are in use after the last one.
            is_host: Tensors lie in the host's memory, where the end of older blocks is not traced:
                what is not there at both ends counts from when it is allocated anew.
        """
        events = [e for e in self._memory if (e["args"]["Device Type"] == 0) == is_host]
        level = _level(events, kept, still)
        if events and not is_host:
            level = events[0]["args"]["Total Allocated"] - events[0]["args"]["Bytes"]
        peak, peak_in, most = level, "", Counter[str]()
        levels = [(self.window[0], level)]
        for event in events:
            level += event["args"]["Bytes"]
            levels.append((float(event["ts"]), level))
            around = self._around(event.get("tid"), float(event["ts"]))
            most[_action(around)] = max(most[_action(around)], level)
            if level > peak:
                peak, peak_in = level, next(iter(_actions(around)), "")
        return {
            "kept_bytes": {name: sum(found.values()) for name, found in kept.items()},
            "peak_bytes": peak,
            "peak_in": peak_in,
            "actions": [{"name": n, "peak_bytes": b} for n, b in sorted(most.items())],
            "every_s": length_s([self.window]) / POINTS,
            "bytes": _line(levels, self.window),
        }


def _level(
    events: Sequence[Mapping[str, Any]],
    kept: Mapping[str, Mapping[int, int]],
    still: Container[int],
) -> int:
    """Bytes of what lies there before and after, and was not made in between."""
    new = {event["args"]["Addr"] for event in events if event["args"]["Bytes"] > 0}
    places = chain.from_iterable(found.items() for found in kept.values())
    return sum(size for place, size in places if place in still and place not in new)


def _line(levels: Sequence[tuple[float, int]], window: Stretch) -> list[int]:
    """The highest level around each of ``POINTS`` times; then the last one."""
    begin, end = window
    line = [levels[0][1]] * (POINTS + 1)
    at, level = 0, levels[0][1]
    for time, new in levels:
        until = int((time - begin) / max(end - begin, 1.0) * POINTS)
        while at < min(until, POINTS - 1):
            at += 1
            line[at] = level
        level = new
        line[at] = max(line[at], level)
    line[at + 1 :] = [level] * (POINTS - at)
    return line


def _is_foreign(name: str) -> bool:
    """PyTorch's own, like those around the calls of a library of collectives."""
    return ":" in name and not name.startswith((CALL, WAIT))


def _actions(around: Sequence[str]) -> list[str]:
    """The outermost first."""
    return [name for name in reversed(around) if not name.startswith((CALL, WAIT))]


def _action(around: Sequence[str]) -> str:
    """What kind of action it is: ``F`` for ``F0.3``."""
    found = next(iter(_actions(around)), "between actions")
    return re.sub(r"(?<=^[A-Z])\d+\.\d+$", "", found)


def _by_name(spans: Iterable[Span]) -> dict[str, list[Stretch]]:
    found: defaultdict[str, list[Stretch]] = defaultdict(list)
    for start, end, name in spans:
        found[name].append((start, end))
    return _unions(found)


def _unions(found: Mapping[str, Iterable[Stretch]]) -> dict[str, list[Stretch]]:
    return {name: union(stretches) for name, stretches in found.items()}
