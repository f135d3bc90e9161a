"""The machines of a job as what its ranks run on: who has which place, and who takes whose."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from weft.comm.address import RankAddress
from weft.elastic.failure import ANEW, Epoch, Failure
from weft.elastic.nodes.head import LOOK_S, Head
from weft.elastic.nodes.meeting import Store
from weft.elastic.nodes.places import Place, has, place_on
from weft.elastic.nodes.remote import Node
from weft.elastic.process import PHASE, LocalProcess, Process
from weft.elastic.rank_process import Begin
from weft.elastic.recovery import Restarts
from weft.elastic.signals import Asked


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
        self._given_up = WeakKeyDictionary[Node, set[tuple[int, str, int]]]()
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

    def free(self) -> list[int]:
        """For each place that nobody has, on machines that are there, the index of its machine."""
        taken = {place.device for place in self.places} | self._nobodys()
        found = list[int]()
        for node in self.head.there:
            used = sum(device[0] == node.index for device in taken)
            found += [node.index] * (node.hello.seats - used if node.is_ready else 0)
        return found

    def arranged(
        self, seats: Sequence[tuple[int, int]], kinds: Sequence[tuple[str, str | None]]
    ) -> tuple[Place, ...] | None:
        """Places for the ranks of another plan, whose processes stay on their devices where they
        can; None: a machine has too few of a kind.

        Args:
            seats: For each rank the index of its machine, and the rank that its process was, or
                ``ANEW``.
            kinds: For each rank the family of its device, and its name, or None for any.
        """
        places = dict[int, Place]()
        for rank, ((_, seat), (family, chip)) in enumerate(zip(seats, kinds, strict=True)):
            stays = None if seat == ANEW else self.places[seat]
            if stays and stays.kind.family == family and chip in (None, stays.kind.chip):
                places[rank] = stays
        for rank, ((index, _), (family, chip)) in enumerate(zip(seats, kinds, strict=True)):
            if rank not in places:
                taken = {place.device for place in places.values()} | self._nobodys()
                place = place_on(self.head.nodes[index].hello, family, chip, taken)
                if place is None:
                    return None
                places[rank] = place
        return tuple(place for _, place in sorted(places.items()))

    def give_up(self, ranks: Sequence[int]) -> None:
        """Nobody gets their places, until the command of their machine is started again."""
        for rank in ranks:
            self._given_up.setdefault(self._began_on[rank], set()).add(self.places[rank].device)

    def lacking(self) -> list[int]:
        """Ranks whose machine is not there, or came back without their device."""
        there = {node.index: node.hello for node in self.head.there if node.is_ready}
        seats = Counter({index: hello.seats for index, hello in there.items()})
        found = list[int]()
        for rank, place in enumerate(self.places):
            hello = there.get(place.node)
            if hello is None or seats[place.node] == 0 or not has(hello, place):
                found.append(rank)
            else:
                seats[place.node] -= 1
        return found

    def move_lost(self) -> list[int]:
        """Give ranks whose machine is lost a place elsewhere; those that still have none."""
        for rank in self.lacking():
            kind = self.places[rank].kind
            taken = {place.device for place in self.places} | self._nobodys()
            nodes = map(self.head.nodes.__getitem__, dict.fromkeys(self.free()))
            found = (place_on(node.hello, kind.family, kind.chip, taken) for node in nodes)
            place = next(filter(None, found), None)
            if place is not None:
                self.places = (*self.places[:rank], place, *self.places[rank + 1 :])
        return self.lacking()

    def _nobodys(self) -> set[tuple[int, str, int]]:
        """Devices that were given up, of machines that are there."""
        return {
            device
            for node, devices in self._given_up.items()
            for device in devices
            if self.head.nodes.get(node.index) is node
        }

    def _started(self, node: Node) -> Process:
        return self._start() if node.link is None else node.start(self._pack)


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
