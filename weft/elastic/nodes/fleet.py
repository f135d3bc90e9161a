"""The machines of a job as what its ranks run on: who has which place, and who takes whose."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from weft.comm.address import RankAddress
from weft.elastic.failure import Epoch, Failure
from weft.elastic.nodes.head import LOOK_S, Head
from weft.elastic.nodes.meeting import Store
from weft.elastic.nodes.remote import Node
from weft.elastic.process import PHASE, LocalProcess, Process
from weft.elastic.rank_process import Begin
from weft.elastic.recovery import Restarts
from weft.elastic.signals import Asked
from weft.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Place:
    """Of a rank."""

    node: int
    """Index of its machine."""
    card: int
    """Which of the machine's devices of its family."""


class Fleet:
    """Starts processes where their places are.

    Args:
        start: A new process on this machine.
        folder: Of the run, where ranks of this machine leave what this command reads.
        pack: What other machines are told of a target's arguments.
        store: Where ranks meet.
    """

    def __init__(
        self,
        head: Head,
        host: str,
        store: Store,
        *,
        folder: Path,
        start: Callable[[], LocalProcess],
        pack: Callable[[Begin], Mapping[str, Any]],
    ) -> None:
        self.head = head
        self.places: tuple[Place, ...] = ()
        """Of the ranks of the epoch that is, or that begins."""
        self._given_up = WeakKeyDictionary[Node, set[int]]()
        self._began_on: Sequence[Node] = ()
        """The machines of the ranks of the epoch that is."""
        self._host, self._store, self._folder = host, store, folder
        self._start, self._pack = start, pack

    def settle(
        self, epoch: str, kept: Sequence[Process | None]
    ) -> Sequence[tuple[Process, RankAddress]]:
        """For each rank the process that it is from now on, and its address."""
        assert len(kept) == len(self.places), f"{len(self.places)} places for {len(kept)} ranks"
        here = Counter(place.node for place in self.places)
        before = Counter[int]()
        port = self._store.port()
        settled = list[tuple[Process, RankAddress]]()
        for rank, (process, place) in enumerate(zip(kept, self.places, strict=True)):
            node = self.head.nodes[place.node]
            address = RankAddress(
                rank=rank,
                world_size=len(kept),
                local_rank=before[node.index],
                master=(self._host, port),
                ranks_here=here[node.index],
                node=str(node.index),
                card=place.card,
                meeting=epoch,
                phase_file=self._folder / f"{PHASE}{epoch}-{rank}" if node.link is None else None,
            )
            before[node.index] += 1
            settled.append((process or self._started(node), address))
        self._began_on = [self.head.nodes[place.node] for place in self.places]
        return settled

    def remove_traces(self) -> None:
        """What ranks of this machine left."""
        for path in self._folder.glob(f"{PHASE}*"):
            path.unlink(missing_ok=True)

    def ranks_beside(self, rank: int) -> list[int]:
        """All that its machine has."""
        node = self.places[rank].node
        return [each for each, place in enumerate(self.places) if place.node == node]

    def free(self) -> list[Place]:
        """Places that nobody has, on machines that are there."""
        found = list[Place]()
        for node in self.head.there:
            cards = {place.card for place in self.places if place.node == node.index}
            cards |= self._given_up.get(node, set())
            unused = (card for card in count() if card not in cards)
            spare = node.hello.seats - len(cards) if node.is_ready else 0
            found += [Place(node.index, next(unused)) for _ in range(spare)]
        return found

    def give_up(self, ranks: Sequence[int]) -> None:
        """Nobody gets their places, until the command of their machine is started again."""
        for rank in ranks:
            self._given_up.setdefault(self._began_on[rank], set()).add(self.places[rank].card)

    def lacking(self) -> list[int]:
        """Ranks whose machine is not there."""
        there = {node.index for node in self.head.there if node.is_ready}
        return [rank for rank, place in enumerate(self.places) if place.node not in there]

    def move_lost(self) -> list[int]:
        """Give ranks whose machine is lost a place elsewhere; those that still have none."""
        places = list(self.places)
        for rank, place in zip(self.lacking(), self.free(), strict=False):
            places[rank] = place
        self.places = tuple(places)
        return self.lacking()

    def _started(self, node: Node) -> Process:
        return self._start() if node.link is None else node.start(self._pack)


def ranks_of(places: Sequence[Place]) -> dict[int, list[int]]:
    """The ranks of each machine, by its index."""
    found = dict[int, list[int]]()
    for rank, place in enumerate(places):
        found.setdefault(place.node, []).append(rank)
    return found


def first_places(nodes: Sequence[Node], plan: Plan) -> tuple[Place, ...]:
    """The ranks of a plan on machines, one after the other."""
    seats = [node.index for node in nodes for _ in range(node.hello.seats)]
    return placed(seats[: plan.world_size], plan)


def placed(nodes: Sequence[int], plan: Plan) -> tuple[Place, ...]:
    """``nodes``: for each rank the index of its machine, whose first devices they get."""
    taken = Counter[tuple[int, str]]()
    places = list[Place]()
    for node, device in zip(nodes, plan.devices, strict=True):
        places.append(Place(node, taken[node, device]))
        taken[node, device] += 1
    return tuple(places)


class Replaced:
    """What a job on several machines goes on with: lost ranks begin again on their machine, on one
    that came in its place, or on a spare one.

    Args:
        wait_s: How long to wait for a machine where there is none.
        plan: The job's plan of the moment, as machines that come are told it.
    """

    def __init__(
        self,
        fleet: Fleet,
        restarts: Restarts,
        *,
        plan: Callable[[], str],
        tell: Callable[[str], None],
        asked: Asked,
        wait_s: float,
    ) -> None:
        self._fleet, self._restarts = fleet, restarts
        self._plan, self._tell = plan, tell
        self._asked, self._wait_s = asked, wait_s

    def __call__(self, failures: Sequence[Failure]) -> Epoch | None:
        """What the ranks do next; None: the job is over."""
        self._fleet.head.look(self._plan())
        epoch = self._restarts(failures)
        if epoch is None or not self._fleet.move_lost():
            return epoch
        deadline = time.monotonic() + self._wait_s
        ranks = ", ".join(map(str, self._fleet.lacking()))
        self._tell(f"waits up to {self._wait_s:g} s for a machine for rank {ranks}")
        while self._fleet.move_lost():
            if self._asked.times or time.monotonic() > deadline:
                return None
            links = [n.link.fileno() for n in self._fleet.head.there if n.link is not None]
            wait(links, LOOK_S)
            self._fleet.head.look(self._plan())
        return epoch
