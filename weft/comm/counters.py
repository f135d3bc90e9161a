"""What every named collective sent, so that traffic can be checked against closed formulas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from weft.comm.members import Link


@dataclass(slots=True)
class Count:
    """Totals of one collective name on this rank."""

    calls: int = 0
    messages: int = 0
    """Messages this rank sends, each to one other, with the algorithm that ``bytes`` assumes."""
    bytes: float = 0.0
    """Bytes this rank sends with a bandwidth-optimal algorithm, e.g. 2(p-1)/p x size to reduce."""
    peers: set[int] = field(default_factory=set)

    def add(self, other: Count) -> None:
        self.calls += other.calls
        self.messages += other.messages
        self.bytes += other.bytes
        self.peers |= other.peers


class Counters:
    """Counts by collective name and by how far its calls go."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, Link], Count] = {}

    def add(self, name: str, link: Link, count: Count) -> None:
        self._counts.setdefault((name, link), Count()).add(count)

    def __getitem__(self, name: str) -> Count:
        """Over all links."""
        total = Count()
        for (found, _), count in self._counts.items():
            if found == name:
                total.add(count)
        return total

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({name for name, _ in self._counts}))

    def take(self) -> dict[tuple[str, Link], Count]:
        """What was counted since the last time; counting starts anew."""
        counts, self._counts = self._counts, {}
        return counts
