"""Every collective of a job goes through here: it has a name, a group, a count, a clear error."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from math import prod
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.comm.aside import Aside
from weft.comm.counters import Count, Counters
from weft.comm.errors import CommError
from weft.comm.flight_recorder import Call, FlightRecorder, Kind
from weft.comm.groups import Group, Groups
from weft.comm.members import (
    Channel,
    Choice,
    Edge,
    Link,
    Member,
    Message,
    choose,
    farthest,
    in_words,
    joined,
)
from weft.comm.parts import ascending_places, flat_of, pieces_of, sizes_of
from weft.comm.rendezvous import Rendezvous
from weft.comm.spans import CALL, WAIT, span
from weft.comm.transport import (
    DirectGroup,
    Finish,
    HostCopies,
    NativeGroup,
    Parts,
    StagedGroup,
    nothing,
)
from weft.comm.tree import FAN, Tree

__all__ = ["Arriving", "Comm", "Finish", "Parts"]

NO_EDGES: Mapping[Channel, Collection[Edge]] = {}
T = TypeVar("T")
Arriving = Callable[[], T]
"""Call it to wait for an asynchronous collective and get its result."""


class Comm:
    """One epoch of a job: the groups that this rank is in, and the collectives over them.

    It ends with ``close``, as a context manager does. Afterwards nothing of it is left in the
    process, and another one may be opened.

    All ranks open the groups that they share in the same order. A group of one rank, and a job of
    one process, send nothing.

    Args:
        members: What each rank runs on, in rank order; by default all are alike.
        groups: Where groups are opened; None for a job of one process.
        timeout_s: How long a collective may take.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        device: str | torch.device = "cpu",
        *,
        members: Sequence[Member] = (),
        groups: Groups | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.world = tuple(range(world_size))
        self.members = list(members) or [Member()] * world_size
        self.groups = groups
        self.counters = Counters()
        self.recorder = FlightRecorder(rank)
        self.timeout_s = timeout_s
        self.rendezvous: Rendezvous | None = None
        """Closed too when the epoch ends."""
        self._choices: dict[tuple[tuple[int, ...], bool], Choice] = {}
        """By ranks, and whether they only send to one another."""
        self._transports: dict[tuple[tuple[int, ...], str], NativeGroup] = {}
        """By ranks and purpose."""
        self._links: dict[tuple[int, ...], Link] = {}
        self._tree: Tree | None = None
        self._host_copies: HostCopies | None = None
        self._beside: Aside | None = None

    def __enter__(self) -> Comm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, traceback: TracebackType | None
    ) -> None:
        self.close(abort=kind is not None)

    def within(self, ranks: tuple[int, ...]) -> Comm:
        """The same epoch, as if ``ranks`` were all; ascending, this one among them."""
        _ = self._aside(), self._copies()  # which both end with
        part = copy(self)
        part.world, part.world_size, part._tree = ranks, len(ranks), None
        return part

    def open_groups(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Create those of the groups that this rank is in, and what all ranks talk through: a tree
        over gloo, and where a library joins them all or they are few, a group."""
        if self.world_size > 1:
            self._among_all()
        if self.world_size <= FAN or self._choose(self.world).backend != "gloo":
            self._open(self.world, "calls")
        for ranks in groups:
            self._open(ranks, "calls")

    def open_gathering(
        self, groups: Iterable[tuple[int, ...]], *, purpose: str = "gathers"
    ) -> None:
        """Create what ``all_gather`` needs in those of the groups that this rank is in; for
        ``gathering`` with ``purpose="returns"``.

        It has communicators of its own: gathers may then come in between other calls of the same
        ranks in an order that differs from rank to rank.
        """
        for ranks in groups:
            self._open(ranks, purpose)

    def open_channels(
        self, channels: Iterable[Channel], edges: Mapping[Channel, Collection[Edge]] = NO_EDGES
    ) -> None:
        """Create what this rank's channels need beside the groups of all ranks.

        Where ``edges`` name a channel, nobody sends over it, or meets there, but along them.
        """
        for channel in channels:
            choice = self._choose(channel.ranks, sends=True)
            if choice.backend == "gloo" and self.world_size <= FAN and not channel.apart:
                continue  # over the group of all ranks
            if choice.point_to_point == "ordered" or choice.backend == "gloo":
                self._open_channel(channel, choice, edges.get(channel))
            else:
                self._open(channel.ranks, "calls")  # tags keep them apart

    def transports(self) -> list[str]:
        """How each group of ranks talks, in words; those that talk alike in one line."""
        lines: dict[str, list[str]] = {}
        for (ranks, _), choice in sorted(self._choices.items()):
            lines.setdefault(str(choice), []).append(in_words(ranks))
        return [f"{', '.join(dict.fromkeys(groups))}: {how}" for how, groups in lines.items()]

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
            return nothing
        if self._is_by_tree(ranks):
            reduce = partial(self._among_all().all_reduce, tensor, largest=largest)
            self._through_tree(reduce, name, tensor.nbytes)
            return nothing
        messages = 2 * (len(ranks) - 1)
        sent = messages / len(ranks) * tensor.nbytes
        begin = partial(self._group(ranks).all_reduce, tensor, largest=largest)
        finish = self._start(name, ranks, tensor.nbytes, begin, messages=messages, sent=sent)
        if wait:
            finish()
            return nothing
        return finish

    def exchange(
        self,
        parts: Sequence[Tensor],
        sizes: Sequence[Sequence[int]],
        *,
        name: str,
        group: tuple[int, ...],
    ) -> Arriving[list[Tensor]]:
        """Start an all-to-all of unequal parts: ``parts[i]`` goes to the group's ``i``-th rank, in
        whatever order the group names its ranks.

        ``sizes[i]`` is the shape of what comes from it. Shard -> Shard of another dimension.
        ``parts`` must not change before the result was called.
        """
        ascending = ascending_places(group)
        flat = flat_of(parts, ascending)
        counts = [prod(sizes[i]) for i in ascending]
        result = torch.empty(sum(counts), dtype=flat.dtype, device=flat.device)
        given = [parts[i].numel() for i in ascending]
        begin = partial(self._group(group).all_to_all, result, flat, counts, given)
        messages, sent = self._sent(parts, group)
        finish = self._start(name, group, sent, begin, messages=messages, sent=sent)

        def arrived() -> list[Tensor]:
            _ = flat  # which nobody lets go of before
            finish()
            return pieces_of(result, counts, ascending, sizes)

        return arrived

    def gather_parts(
        self, part: Tensor, sizes: Sequence[Sequence[int]], *, name: str, group: tuple[int, ...]
    ) -> Arriving[list[Tensor]]:
        """Start to collect every rank's contiguous ``part``, in the group's order.

        Shard -> Replicate. ``sizes[i]`` is the shape of what comes from its ``i``-th rank; parts
        may be unequal. ``part`` must not change before the result was called.
        """
        ascending = ascending_places(group)
        counts = [prod(sizes[i]) for i in ascending]
        flat = torch.empty(sum(counts), dtype=part.dtype, device=part.device)
        begin = partial(self._group(group).gather_parts, part, flat, counts)
        messages, sent = self._sent([part] * len(group), group)
        finish = self._start(name, group, sent, begin, messages=messages, sent=sent)

        def result() -> list[Tensor]:
            finish()
            return pieces_of(flat, counts, ascending, sizes)

        return result

    def reduce_scatter_parts(
        self, parts: Sequence[Tensor], *, name: str, group: tuple[int, ...]
    ) -> Arriving[Tensor]:
        """Start to sum ``parts[i]`` over the group for its ``i``-th rank; the result is this one's.

        Partial -> Shard. Parts may be unequal. Added in the group's order, as far as we add.
        """
        ascending = ascending_places(group)
        flat = torch.cat([parts[i].reshape(-1) for i in ascending])
        counts = [parts[i].numel() for i in ascending]
        order = [ascending.index(i) for i in range(len(group))]
        mine = parts[group.index(self.rank)]
        own = torch.empty_like(mine, memory_format=torch.contiguous_format)
        begin = partial(self._group(group).scatter_sum, flat, own, counts, order)
        messages, sent = self._sent(parts, group)
        finish = self._start(name, group, sent, begin, messages=messages, sent=sent)

        def result() -> Tensor:
            finish()
            return own

        return result

    def reduce_scatter(
        self,
        flat: Tensor,
        own: Tensor,
        *,
        name: str,
        group: tuple[int, ...],
        sizes: Sequence[int] = (),
    ) -> Finish:
        """Start to sum ``flat`` over the group; each rank's segment goes to it.

        Partial -> Shard. ``own`` holds the sum when the result was called, with gloo in the order
        of ranks; ``flat`` must not change before. The ranks are ascending in ``group``. ``sizes``:
        elements of each segment, some of which may have none; equal ones by default.
        """
        if len(group) == 1:
            own.copy_(flat)
            return nothing
        sizes = sizes_of(flat, group, sizes)
        assert own.numel() == sizes[group.index(self.rank)], f"{own.numel()} elements of {sizes}"
        begin = partial(self._group(group).reduce_scatter, flat, own, sizes)
        sent, messages = flat.nbytes - own.nbytes, len(group) - 1
        return self._start(name, group, flat.nbytes, begin, messages=messages, sent=sent)

    def all_gather(
        self, flat: Tensor, *, name: str, group: tuple[int, ...], sizes: Sequence[int] = ()
    ) -> Finish:
        """Start to fill ``flat``, in place, with every rank's own segment of it.

        Shard -> Replicate. ``flat`` is valid when the result was called. The group names its ranks
        in ascending order. ``sizes``: as in ``reduce_scatter``.
        """
        if len(group) == 1:
            return nothing
        sizes, messages = sizes_of(flat, group, sizes), len(group) - 1
        transport = self._transports[group, "gathers"]
        begin = partial(transport.all_gather, flat, group, self.rank, sizes)
        sent = messages * sizes[group.index(self.rank)] * flat.itemsize
        return self._start(
            name, group, flat.nbytes, begin, messages=messages, sent=sent, kind="gather"
        )

    def broadcast(
        self, tensor: Tensor, *, src: int, name: str, group: tuple[int, ...] | None = None
    ) -> None:
        """Copy ``tensor`` of rank ``src`` into every rank's, in place."""
        ranks = self.world if group is None else group
        if len(ranks) == 1:
            return
        if self._is_by_tree(ranks):
            assert src == self.world[0], f"broadcast of rank {src} to all {self.world_size} ranks"
            copy = partial(self._among_all().broadcast, tensor)
            self._through_tree(copy, name, tensor.nbytes)
            return
        begin = partial(self._group(ranks).broadcast, tensor, src)
        is_src = int(self.rank == src)
        size = tensor.nbytes
        self._start(name, ranks, size, begin, messages=is_src, sent=is_src * size)()

    def send(self, parts: Parts, *, channel: Channel, name: str) -> Finish:
        """Start to send contiguous tensors, each to the rank beside it, over a channel.

        They must not change until the result was called.
        """
        self._count(parts, name)
        begin = partial(self._channel(channel).send, parts, channel.number)
        return self._between("send", name, parts, begin)

    def receive(self, parts: Parts, *, channel: Channel, name: str) -> Finish:
        """Start to receive into contiguous tensors, each from the rank beside it.

        They are valid when the result was called. What comes from one rank over one channel is
        received in the order in which it was sent.
        """
        begin = partial(self._channel(channel).receive, parts, channel.number)
        return self._between("receive", name, parts, begin)

    def trading(
        self, sent: Parts, received: Parts, *, channel: Channel, name: str
    ) -> Callable[[], Finish]:
        """What starts to send and receive contiguous tensors over a channel, all at once; counted
        now. Ranks that have nothing for each other may leave each other out."""
        parts = [(peer, part) for peer, part in sent if part.numel()]
        self._count(parts, name)
        rooms = [(peer, part) for peer, part in received if part.numel()]
        if not parts and not rooms:
            return lambda: nothing
        return partial(self._channel(channel).exchange, parts, rooms, channel.number)

    def trade(self, sent: Parts, received: Parts, *, channel: Channel, name: str) -> Finish:
        """Start what ``trading`` has. The tensors are free when the result was called."""
        begin = self.trading(sent, received, channel=channel, name=name)
        return self._between("trade", name, (*sent, *received), begin)

    def gathering(self, flat: Tensor, *, name: str, group: tuple[int, ...]) -> Callable[[], Finish]:
        """What starts ``all_gather`` over communicators for that alone; counted now."""
        size = len(group)
        peers = {rank for rank in group if rank != self.rank}
        sent = (size - 1) / size * flat.nbytes
        self.counters.add(name, self._link(group), Count(1, size - 1, sent, peers))
        transport, sizes = self._transports[group, "returns"], sizes_of(flat, group, ())
        return partial(transport.all_gather, flat, group, self.rank, sizes)

    def room(self, like: Tensor) -> Tensor:
        """Memory for what ``chain`` receives: free again when nobody refers to it."""
        return self._aside().room(like)

    def chain(
        self,
        first: Finish,
        steps: Sequence[Callable[[], Finish]],
        *,
        name: str,
        group: tuple[int, ...],
    ) -> tuple[Finish, Finish]:
        """Start ``steps`` one after the other, each when the one before has ended, the first when
        ``first`` has; beside what this rank does. They talk among ranks of ``group``.

        Returns what waits until ``first`` has ended, and until all have. Nobody else calls
        ``first``, nor touches or lets go of the tensors that it and the steps use, until then. All
        ranks begin chains that they share in one order.
        """
        on_host = any(self._choose(group, sends=sends).ends_on_host for sends in (False, True))
        call = self.recorder.begin(name, "group", group, 0)
        first_ended, ended = self._aside().chain(first, steps, on_host=on_host)
        return self._awaited(call, first_ended), self._awaited(call, ended)

    def _aside(self) -> Aside:
        if self._beside is None:
            self._beside = Aside(self.device)
        return self._beside

    def reserve(self, messages: Iterable[Message]) -> None:
        """Be ready for these, all under way at once: make what host memory they go through."""
        staged = [
            (size, dtype)
            for channel, size, dtype in messages
            if self._choose(channel.ranks, sends=True).through_host
        ]
        if staged:
            self._copies().reserve(staged)

    def gather_json(self, value: Any, *, name: str) -> list[Any]:
        """Every rank's ``value``, in rank order, on every rank: equal ones may be one object."""
        text = json.dumps(value)
        if self.world_size == 1:
            return [json.loads(text)]
        gather = self._among_all().gather_json
        return self._through_tree(partial(gather, text), name, len(text))

    def barrier(self, *, name: str) -> None:
        """Return when every rank of the job has come here."""
        if self.world_size > 1:
            here = torch.zeros(1)
            self._through_tree(partial(self._among_all().all_reduce, here), name, here.nbytes)

    def close(self, *, abort: bool = False) -> None:
        """Leave the epoch. No rank has to wait for the others before, nor is one disturbed.
        ``abort``: something failed, and what the others still do with the epoch fails too."""
        for threads in (self._beside, self._host_copies):
            if threads is not None:
                threads.close(wait=not abort)
        self._beside = self._host_copies = None
        self._transports.clear()
        self._tree = None
        if self.groups is not None:
            self.groups.abort() if abort else self.groups.close()
            self.groups = None
        self.recorder.close()
        if self.rendezvous is not None:
            self.rendezvous.close(wait=not abort)
            self.rendezvous = None

    def _through_tree(self, part: Callable[[], T], name: str, num_bytes: int) -> T:
        call, found = self.recorder.begin(name, "group", self.world, num_bytes), list[T]()
        self._awaited(call, lambda: found.append(part()))()
        count = self._among_all().take()
        count.calls = 1
        self.counters.add(name, self._link(self.world), count)
        return found[0]

    def _is_by_tree(self, ranks: tuple[int, ...]) -> bool:
        """No group was opened for what all of so many ranks do."""
        is_open = (ranks, "calls") in self._transports
        return ranks == self.world and self.world_size > FAN and not is_open

    def _among_all(self) -> Tree:
        """What joins all ranks: gloo, on tensors in host memory."""
        if self._tree is None:
            self._tree = Tree(self.rank, self.world, self._host_group)
        return self._tree

    def _count(self, parts: Parts, name: str) -> None:
        """Messages that this rank sends, each of its own."""
        by_link: dict[Link, Count] = {}
        for dst, part in parts:
            count = by_link.setdefault(self._link((self.rank, dst)), Count(calls=1))
            count.add(Count(messages=1, bytes=part.nbytes, peers={dst}))
        for link, count in by_link.items():
            self.counters.add(name, link, count)

    def _sent(self, parts: Sequence[Tensor], group: tuple[int, ...]) -> tuple[int, int]:
        """Messages and bytes of the parts that go to other ranks of a group, one to each."""
        others = [part for part, rank in zip(parts, group, strict=True) if rank != self.rank]
        return sum(part.numel() > 0 for part in others), sum(part.nbytes for part in others)

    def _group(self, ranks: tuple[int, ...]) -> NativeGroup:
        if ranks == self.world and (ranks, "calls") not in self._transports:
            assert self._choose(ranks) == Choice("gloo"), "nothing was opened for all ranks"
            self._transports[ranks, "calls"] = self._host_group(ranks)
        return self._transports[ranks, "calls"]

    def _host_group(self, ranks: tuple[int, ...]) -> NativeGroup:
        """For what all ranks say, over gloo, on tensors in host memory."""
        purpose = "calls" if ranks == self.world else "control"
        return NativeGroup(self._opened().open(ranks, "gloo", purpose))

    def _opened(self) -> Groups:
        if self.groups is None:
            raise CommError(f"rank {self.rank}: this epoch was closed")
        return self.groups

    def _choose(self, ranks: tuple[int, ...], *, sends: bool = False) -> Choice:
        if (ranks, sends) not in self._choices:
            members = [self.members[rank] for rank in ranks]
            self._choices[ranks, sends] = choose(members, sends=sends)
        return self._choices[ranks, sends]

    def _open(self, ranks: tuple[int, ...], purpose: str) -> None:
        """Open the group if this rank is in it; how it talks is known of every group."""
        if len(ranks) == 1:
            return
        choice = self._choose(ranks)
        if self.rank not in ranks or (ranks, purpose) in self._transports:
            return
        if choice.through_host:
            # Begun by a thread of its own: apart from what this one asks of the same ranks.
            group = self._opened().open(ranks, choice.backend, f"staged {purpose}")
            self._transports[ranks, purpose] = self._staged(group)
            return
        group = self._opened().open(ranks, choice.backend, purpose)
        if choice.backend == "gloo":
            self._transports[ranks, purpose] = NativeGroup(group)
            return
        transport = DirectGroup(group, choice.point_to_point)
        # Libraries that connect at the first call do so now, while all ranks keep one order.
        transport.all_reduce(torch.zeros(1, device=self.device), largest=False)()
        self._transports[ranks, purpose] = transport

    def _open_channel(
        self, channel: Channel, choice: Choice, edges: Collection[Edge] | None
    ) -> None:
        """Open and connect what messages alone go over, if this rank has a part."""
        members = channel.ranks if edges is None else joined(self.rank, edges)
        purpose = f"channel {channel.number}"
        key = channel.ranks, purpose
        if self.rank not in channel.ranks or len(members) == 1 or key in self._transports:
            return
        if choice.backend == "gloo":
            kind = ("messages", "apart")[channel.apart]  # of all their channels
            group = self._opened().open(members, "gloo", kind)
            self._transports[key] = (
                self._staged(group) if choice.through_host else NativeGroup(group)
            )
            return
        group = self._opened().open(members, choice.backend, purpose, sends=True)
        transport = DirectGroup(group, "ordered")
        one = torch.zeros(1, device=self.device)
        if edges is None:  # libraries that connect at the first call need all members there
            transport.all_reduce(one, largest=False)()
        else:
            going = [(dst, one) for src, dst in sorted(edges) if src == self.rank]
            coming = [(src, one.clone()) for src, dst in sorted(edges) if dst == self.rank]
            transport.exchange(going, coming)()
        self._transports[key] = transport

    def _staged(self, group: Group) -> StagedGroup:
        return StagedGroup(group, self._copies())

    def _copies(self) -> HostCopies:
        if self._host_copies is None:
            self._host_copies = HostCopies(self.device)
        return self._host_copies

    def _channel(self, channel: Channel) -> NativeGroup:
        key = channel.ranks, f"channel {channel.number}"
        if key not in self._transports:
            choice = self._choose(channel.ranks, sends=True)
            assert choice.point_to_point == "tagged", f"{channel} was not opened"
            if choice.backend == "gloo" and self.world_size <= FAN:
                world = self._opened().open(self.world, "gloo", "calls")
                self._transports[key] = (
                    self._staged(world) if choice.through_host else NativeGroup(world)
                )
            else:
                self._transports[key] = self._group(channel.ranks)
        return self._transports[key]

    def _link(self, ranks: tuple[int, ...]) -> Link:
        if ranks not in self._links:
            self._links[ranks] = farthest([self.members[rank] for rank in ranks])
        return self._links[ranks]

    def _between(self, kind: Kind, name: str, parts: Parts, begin: Callable[[], Finish]) -> Finish:
        peers = tuple(sorted({peer for peer, _ in parts}))
        num_bytes = sum(part.nbytes for _, part in parts)
        return self._recorded(self.recorder.begin(name, kind, peers, num_bytes), begin)

    def _start(
        self,
        name: str,
        ranks: tuple[int, ...],
        num_bytes: int,
        begin: Callable[[], Finish],
        *,
        messages: int,
        sent: float,
        kind: Kind = "group",
    ) -> Finish:
        """``messages`` and ``sent``: what this rank sends, as ``Count`` has it."""
        peers = {rank for rank in ranks if rank != self.rank}
        self.counters.add(name, self._link(ranks), Count(1, messages, sent, peers))
        return self._recorded(self.recorder.begin(name, kind, ranks, num_bytes), begin)

    def _recorded(self, call: Call, begin: Callable[[], Finish]) -> Finish:
        with span(f"{CALL}{call.name}"):
            wait = self.recorder.named(call, begin)
        return self._awaited(call, wait)

    def _awaited(self, call: Call, wait: Finish) -> Finish:
        def finish() -> None:
            self.recorder.wait(call)
            with span(f"{WAIT}{call.name}"):
                self.recorder.named(call, wait)
            self.recorder.end(call)

        return finish
