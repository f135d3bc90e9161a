"""Every collective of a job goes through here: it has a name, a group, a count, a clear error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import Channel
from weft.comm.counters import Count, Counters
from weft.comm.errors import CommError
from weft.comm.flight import Call, Flight, Kind
from weft.comm.members import Choice, Link, Member, choose, farthest, in_words
from weft.comm.transport import (
    DirectGroup,
    Finish,
    HostCopies,
    NativeGroup,
    Parts,
    StagedGroup,
    Transport,
)

__all__ = ["Comm", "Finish", "Parts"]

T = TypeVar("T")


class Comm:
    """The groups of one job and the collectives over them.

    Every rank must name the same groups in the same order in ``open_groups``: group creation is
    itself collective. A group of one rank, and a job of one process, send nothing.

    Args:
        members: What each rank runs on, in rank order; by default all are alike.
        timeout_s: How long a collective may take.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        device: str | torch.device = "cpu",
        *,
        members: Sequence[Member] = (),
        timeout_s: float = 600.0,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.world = tuple(range(world_size))
        self.members = list(members) or [Member()] * world_size
        self.counters = Counters()
        self.flight = Flight(rank)
        self.timeout_s = timeout_s
        self._choices: dict[tuple[int, ...], Choice] = {}
        self._transports: dict[tuple[int, ...], Transport] = {}
        self._gathering: dict[tuple[int, ...], Transport] = {}
        self._roads: dict[Channel, Transport] = {}
        self._links: dict[tuple[int, ...], Link] = {}
        self._host_copies: HostCopies | None = None

    def open_groups(
        self, groups: Iterable[tuple[int, ...]], timeout_s: float | None = None
    ) -> None:
        """Create the groups that do not exist yet, and that of all ranks. Collective.

        Their calls may take ``timeout_s``; None: as long as those of the job.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        for ranks in (self.world, *groups):
            if len(ranks) > 1 and ranks not in self._transports:
                choice = self._choose(ranks)
                is_default = ranks == self.world and choice == Choice("gloo")
                handle = None if is_default else self._new_group(ranks, choice, timeout_s)
                self._transports[ranks] = self._transport(choice, handle)
                self._connect(ranks, self._transports[ranks], choice)

    def open_gathering(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Create what ``all_gather`` needs. Collective.

        It has communicators of its own: gathers may then come in between other calls of the same
        ranks in an order that differs from rank to rank.
        """
        for ranks in groups:
            if len(ranks) > 1 and ranks not in self._gathering:
                choice = self._choose(ranks)
                handle = self._new_group(ranks, choice, self.timeout_s)
                self._gathering[ranks] = self._transport(choice, handle)
                self._connect(ranks, self._gathering[ranks], choice)

    def open_channels(self, channels: Iterable[Channel]) -> None:
        """Create what channels need that have a communicator of their own. Collective."""
        for channel in channels:
            choice = self._choose(channel.ranks)
            if choice.backend == "gloo":
                continue  # tags keep them apart
            transport = self._transport(
                choice, self._new_group(channel.ranks, choice, self.timeout_s)
            )
            if self.rank in channel.ranks:
                self._roads[channel] = transport
            self._connect(channel.ranks, transport, choice)

    def transports(self) -> list[str]:
        """How each group of ranks talks, in words; those that talk alike in one line."""
        lines: dict[str, list[str]] = {}
        for ranks, choice in sorted(self._choices.items()):
            lines.setdefault(str(choice), []).append(in_words(ranks))
        return [f"{', '.join(groups)}: {how}" for how, groups in lines.items()]

    def all_reduce(
        self,
        tensor: Tensor,
        *,
        name: str,
        group: tuple[int, ...] | None = None,
        wait: bool = True,
        largest: bool = False,
    ) -> Finish:
        """Sum (or take the largest of) ``tensor`` over the group, in place.

        Partial -> Replicate. With ``wait=False`` the caller calls the result before it reads.
        """
        ranks = self.world if group is None else group
        if len(ranks) == 1:
            return _nothing
        others = len(ranks) - 1
        self._count(name, ranks, 2 * others, 2 * others / len(ranks) * tensor.nbytes)
        transport = self._group(ranks)
        finish = self._start(
            name, ranks, tensor.nbytes, lambda: transport.all_reduce(tensor, largest=largest)
        )
        if wait:
            finish()
            return _nothing
        return finish

    def exchange(
        self,
        parts: Sequence[Tensor],
        sizes: Sequence[Sequence[int]],
        *,
        name: str,
        group: tuple[int, ...],
    ) -> list[Tensor]:
        """All-to-all of unequal parts: ``parts[i]`` goes to the group's ``i``-th rank, in whatever
        order the group names its ranks.

        ``sizes[i]`` is the shape of what comes from it. Shard -> Shard of another dimension.
        """
        others = [part for part, rank in zip(parts, group, strict=True) if rank != self.rank]
        sent = sum(part.nbytes for part in others)
        self._count(name, group, sum(part.numel() > 0 for part in others), sent)
        ascending = sorted(range(len(group)), key=group.__getitem__)  # as PyTorch numbers them
        flat = torch.cat([parts[i].reshape(-1) for i in ascending])
        counts = [prod(sizes[i]) for i in ascending]
        result = torch.empty(sum(counts), dtype=flat.dtype, device=flat.device)
        given = [parts[i].numel() for i in ascending]
        transport = self._group(group)
        self._start(name, group, sent, lambda: transport.all_to_all(result, flat, counts, given))()
        pieces = dict(zip(ascending, torch.split(result, counts), strict=True))
        return [pieces[i].view(*size) for i, size in enumerate(sizes)]

    def reduce_scatter(
        self, flat: Tensor, own: Tensor, *, name: str, group: tuple[int, ...]
    ) -> Finish:
        """Start to sum ``flat`` ``[ranks x n]`` over the group; each rank's segment goes to it.

        Partial -> Shard. ``own`` ``[n]`` holds the sum when the result was called, with gloo in
        the order of ranks; ``flat`` must not change before. The ranks are ascending in ``group``.
        """
        size = len(group)
        assert flat.numel() == size * own.numel(), f"{flat.numel()} elements for {size} ranks"
        self._count(name, group, size - 1, (size - 1) / size * flat.nbytes)
        transport = self._group(group)
        return self._start(
            name, group, flat.nbytes, lambda: transport.reduce_scatter(flat, own, len(group))
        )

    def all_gather(self, flat: Tensor, *, name: str, group: tuple[int, ...]) -> Finish:
        """Start to fill ``flat`` ``[ranks x n]``, in place, with every rank's own segment of it.

        Shard -> Replicate. ``flat`` is valid when the result was called. The group names its ranks
        in ascending order.
        """
        size = len(group)
        self._count(name, group, size - 1, (size - 1) / size * flat.nbytes)
        transport = self._gathering[group]
        begin = lambda: transport.all_gather(flat, group, self.rank)  # noqa: E731
        return self._recorded(self.flight.begin(name, "gather", group, flat.nbytes), begin)

    def broadcast(
        self, tensor: Tensor, *, src: int, name: str, group: tuple[int, ...] | None = None
    ) -> None:
        """Copy ``tensor`` of rank ``src`` into every rank's, in place."""
        ranks = self.world if group is None else group
        if len(ranks) == 1:
            return
        is_src = self.rank == src
        self._count(name, ranks, int(is_src), tensor.nbytes if is_src else 0.0)
        transport = self._group(ranks)
        self._start(name, ranks, tensor.nbytes, lambda: transport.broadcast(tensor, src))()

    def send(self, parts: Parts, *, channel: Channel, name: str) -> Finish:
        """Start to send contiguous tensors, each to the rank beside it, over a channel.

        They must not change until the result was called.
        """
        by_link: dict[Link, Count] = {}
        for dst, part in parts:
            count = by_link.setdefault(self._link((self.rank, dst)), Count(calls=1))
            count.add(Count(messages=1, bytes=part.nbytes, peers={dst}))
        for link, count in by_link.items():
            self.counters.add(name, link, count)
        road = self._road(channel)
        return self._between("send", name, parts, lambda: road.send(parts, channel.number))

    def receive(self, parts: Parts, *, channel: Channel, name: str) -> Finish:
        """Start to receive into contiguous tensors, each from the rank beside it.

        They are valid when the result was called. What comes from one rank over one channel is
        received in the order in which it was sent.
        """
        road = self._road(channel)
        return self._between("receive", name, parts, lambda: road.receive(parts, channel.number))

    def gather_json(self, value: Any, *, name: str) -> list[Any]:
        """Every rank's ``value``, in rank order, on every rank. JSON on the wire, never pickle."""
        text = json.dumps(value).encode()
        if self.world_size == 1:
            return [json.loads(text)]
        size = torch.zeros(self.world_size, dtype=torch.int64)
        size[self.rank] = len(text)
        self._sum_on_host(size, name)
        table = torch.zeros(self.world_size, int(size.max()), dtype=torch.uint8)
        table[self.rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._sum_on_host(table, name)
        rows = table.numpy()
        return [json.loads(rows[r, : int(n)].tobytes()) for r, n in enumerate(size.tolist())]

    def barrier(self, *, name: str) -> None:
        """Return when every rank of the job has come here."""
        if self.world_size > 1:
            self._sum_on_host(torch.zeros(1), name)

    def close(self) -> None:
        """Leave the job."""
        if self._host_copies is not None:
            self._host_copies.close()
        for known in (self._transports, self._gathering, self._roads):
            known.clear()  # a group's threads and sockets end with the last that holds it
        if dist.is_initialized():
            dist.destroy_process_group()

    def _sum_on_host(self, tensor: Tensor, name: str) -> None:
        """Over all ranks; gloo joins them whatever they run on."""
        host = NativeGroup(None)
        others = self.world_size - 1
        self._count(name, self.world, 2 * others, 2 * others / self.world_size * tensor.nbytes)
        begin = lambda: host.all_reduce(tensor, largest=False)  # noqa: E731
        self._start(name, self.world, tensor.nbytes, begin)()

    def _group(self, ranks: tuple[int, ...]) -> Transport:
        if ranks == self.world and ranks not in self._transports:
            assert self._choose(ranks) == Choice("gloo"), "the group of all ranks was not opened"
            self._transports[ranks] = NativeGroup(None)
        return self._transports[ranks]

    def _choose(self, ranks: tuple[int, ...]) -> Choice:
        if ranks not in self._choices:
            self._choices[ranks] = choose([self.members[rank] for rank in ranks])
        return self._choices[ranks]

    def _new_group(
        self, ranks: tuple[int, ...], choice: Choice, timeout_s: float
    ) -> dist.ProcessGroup | None:
        timeout = timedelta(seconds=timeout_s)
        handle = dist.new_group(list(ranks), backend=choice.backend, timeout=timeout)
        return handle if self.rank in ranks else None

    def _transport(self, choice: Choice, handle: dist.ProcessGroup | None) -> Transport:
        if not choice.through_host:
            return NativeGroup(handle) if choice.backend == "gloo" else DirectGroup(handle)
        if self._host_copies is None:
            self._host_copies = HostCopies(self.device)
        return StagedGroup(handle, self._host_copies)

    def _connect(self, ranks: tuple[int, ...], transport: Transport, choice: Choice) -> None:
        """Libraries that connect at the first call do so now, while all ranks keep one order."""
        if self.rank in ranks and choice.backend != "gloo":
            transport.all_reduce(torch.zeros(1, device=self.device), largest=False)()

    def _road(self, channel: Channel) -> Transport:
        if channel not in self._roads:
            choice = self._choose(channel.ranks)
            assert choice.backend == "gloo", f"{channel} was not opened"
            self._roads[channel] = self._transport(choice, None)
        return self._roads[channel]

    def _link(self, ranks: tuple[int, ...]) -> Link:
        if ranks not in self._links:
            self._links[ranks] = farthest([self.members[rank] for rank in ranks])
        return self._links[ranks]

    def _count(self, name: str, ranks: tuple[int, ...], messages: int, num_bytes: float) -> None:
        peers = {rank for rank in ranks if rank != self.rank}
        count = Count(calls=1, messages=messages, bytes=num_bytes, peers=peers)
        self.counters.add(name, self._link(ranks), count)

    def _between(self, kind: Kind, name: str, parts: Parts, begin: Callable[[], Finish]) -> Finish:
        peers = tuple(sorted({peer for peer, _ in parts}))
        num_bytes = sum(part.nbytes for _, part in parts)
        return self._recorded(self.flight.begin(name, kind, peers, num_bytes), begin)

    def _start(
        self, name: str, ranks: tuple[int, ...], num_bytes: float, begin: Callable[[], Finish]
    ) -> Finish:
        return self._recorded(self.flight.begin(name, "group", ranks, int(num_bytes)), begin)

    def _recorded(self, call: Call, begin: Callable[[], Finish]) -> Finish:
        wait = self._named(call, begin)

        def finish() -> None:
            self.flight.wait(call)
            self._named(call, wait)
            self.flight.end(call)

        return finish

    def _named(self, call: Call, part: Callable[[], T]) -> T:
        """Run one part of a collective, and say in an error which one it was and with whom."""
        try:
            return part()
        except RuntimeError as error:
            self.flight.wait(call)
            self.flight.write()
            peers = ", ".join(str(r) for r in call.ranks if r != self.rank)
            text = str(error).splitlines()[0]
            message = f"rank {self.rank}: {call.name} with rank(s) {peers} failed: {text}"
            raise CommError(message) from error


def _nothing() -> None:
    """There is nothing to wait for."""
