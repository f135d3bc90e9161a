"""How late messages between ranks are, and how fast: measured, one pair at a time.

A pair plays ping-pong: a message of eight bytes says how late any is; one that takes long enough to
be measured, answered by eight bytes, how fast its bytes follow. Both directions are measured, for
links may be unlike. All other ranks wait, so that nothing else is on the links.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import permutations

import torch

from weft.cluster.topology import Links
from weft.comm.comm import Comm
from weft.comm.members import Channel

NAME = "links"
LEAST_S, MOST_BYTES = 0.03, 1 << 26
"""A message is long enough when it takes so long, or is so long."""
FIRST_BYTES, TIMES_LONGER = 1 << 15, 4
PINGS = 15
LEAST_RATE_S = 1e-6
"""No message is taken to have been faster than this."""


def measure_links(comm: Comm, say: Callable[[str], None] = lambda _: None) -> Links:
    """Collective. Every two ranks, each way: twice as many measurements as pairs."""
    channel = Channel(comm.world, 0)
    ways = list(permutations(comm.world, 2))
    comm.open_channels([channel], {channel: ways})
    own: dict[int, tuple[float, float]] = {}
    for number, (src, dst) in enumerate(ways):
        comm.barrier(name=NAME)
        if number % (len(comm.world) - 1) == 0:
            say(f"links from rank {src} of {len(comm.world)} ...")
        if comm.rank == src:
            own[dst] = _Pair(comm, channel, dst).measured()
        elif comm.rank == dst:
            _Pair(comm, channel, src).answer()
    rows = [own.get(rank, (0.0, 0.0)) for rank in comm.world]
    found = comm.gather_json(rows, name=NAME)
    late, fast = (
        tuple(tuple(float(cell[number]) for cell in row) for row in found) for number in (0, 1)
    )
    hosts = machines(comm)
    date = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return Links(hosts=hosts, latency_s=late, bytes_s=fast, date=date)


def machines(comm: Comm) -> tuple[str, ...]:
    """By rank, what its machine calls itself; where several call themselves the same, or one plays
    several, with the number beside it."""
    nodes = tuple(member.node for member in comm.members)
    names = tuple(node.rpartition("/")[0] for node in nodes)
    return names if len({*names}) == len({*nodes}) else nodes


class _Pair:
    """This rank and another."""

    def __init__(self, comm: Comm, channel: Channel, other: int) -> None:
        self._comm, self._channel, self._other = comm, channel, other
        self._word = torch.zeros(1, dtype=torch.int64, device=comm.device)

    def measured(self) -> tuple[float, float]:
        """Seconds that a message of no length is late, and bytes a second of a long one."""
        late = min(self._there_and_back(8) for _ in range(PINGS)) / 2
        size, seconds = FIRST_BYTES, 0.0
        while seconds < LEAST_S and size < MOST_BYTES:
            size *= TIMES_LONGER
            seconds = min(self._there_and_back(size) for _ in range(2)) - 2 * late
        self._send(torch.zeros_like(self._word))
        return late, size / max(seconds, LEAST_RATE_S)

    def answer(self) -> None:
        """Until the other has what it needs."""
        while size := int(self._received(self._word).item()):
            room = torch.empty(size, dtype=torch.uint8, device=self._comm.device)
            self._send(self._word)
            self._received(room)
            self._send(self._word)

    def _there_and_back(self, size: int) -> float:
        """Of a message of so many bytes and its answer, once the other is ready for it."""
        message = torch.zeros(size, dtype=torch.uint8, device=self._comm.device)
        self._send(torch.full_like(self._word, size))
        self._received(self._word)
        begun = time.perf_counter()
        self._send(message)
        self._received(self._word)
        return time.perf_counter() - begun

    def _send(self, message: torch.Tensor) -> None:
        self._comm.send([(self._other, message)], channel=self._channel, name=NAME)()

    def _received(self, room: torch.Tensor) -> torch.Tensor:
        self._comm.receive([(self._other, room)], channel=self._channel, name=NAME)()
        if room.device.type != "cpu" and room is self._word:
            room.item()  # it is there when the host knows it
        return room
