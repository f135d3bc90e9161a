"""What every named collective sent, so that traffic can be checked against closed formulas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Count:
    """Totals of one collective name on this rank."""

    calls: int = 0
    bytes: float = 0.0
    """Bytes this rank sends with a bandwidth-optimal algorithm, e.g. 2(p-1)/p x size to reduce."""
    peers: set[int] = field(default_factory=set)


class Counters:
    """Counts by collective name."""

    def __init__(self) -> None:
        self._counts: dict[str, Count] = {}

    def add(self, name: str, num_bytes: float, peers: tuple[int, ...]) -> None:
        count = self._counts.setdefault(name, Count())
        count.calls += 1
        count.bytes += num_bytes
        count.peers.update(peers)

    def __getitem__(self, name: str) -> Count:
        return self._counts.get(name, Count())

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._counts))

    def clear(self) -> None:
        self._counts.clear()
