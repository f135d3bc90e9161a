"""How the ranks of one group really talk: natively, or through host memory.

Both do the same collectives with the same algorithms, so that the numbers do not depend on it.
Every method starts something; what it returns waits for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceOp,
    ReduceScatterOptions,
)

from weft.comm.groups import Group
from weft.comm.memory import ReusedMemory
from weft.platform.base import PointToPoint

Finish = Callable[[], None]
"""Call it to wait for an asynchronous collective."""
Parts = Sequence[tuple[int, Tensor]]
"""Tensors, each with the rank it goes to or comes from."""
PARTS_TAG = 1 << 20
"""Of messages that make up a collective; those of channels are lower."""


class NativeGroup:
    """The collectives of one group, as PyTorch has them, on the tensors themselves.

    ``src``, ``dst`` and peers are ranks of the job; a backend numbers them in the group.
    """

    def __init__(
        self,
        group: Group,
        point_to_point: PointToPoint = "tagged",
        *,
        room: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """``room``: gives memory like a tensor's for what ``scatter_sum`` receives; None: it is
        made for each call."""
        self._group = group
        self._point_to_point = point_to_point
        self._room_like = room or _new

    def all_reduce(self, tensor: Tensor, *, largest: bool) -> Finish:
        """Sum, or take the largest, in place."""
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MAX if largest else ReduceOp.SUM)
        return _wait_for(self._group.handle.allreduce([tensor], options))

    def broadcast(self, tensor: Tensor, src: int) -> Finish:
        """Copy ``src``'s values into every rank's tensor."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = self._group.number(src), 0
        return _wait_for(self._group.handle.broadcast([tensor], options))

    def all_to_all(
        self, result: Tensor, flat: Tensor, counts: Sequence[int], given: Sequence[int]
    ) -> Finish:
        """``given[i]`` elements of ``flat`` go to the ``i``-th rank; ``counts[i]`` come from it."""
        handle, options = self._group.handle, AllToAllOptions()
        return _wait_for(handle.alltoall_base(result, flat, list(counts), list(given), options))

    def reduce_scatter(self, flat: Tensor, own: Tensor, sizes: Sequence[int]) -> Finish:
        """``own`` gets this rank's segment of the sum of ``flat``, added in rank order.

        Gloo's own takes almost twice the time of an exchange and a sum.
        """
        ranks, each = len(sizes), own.numel()
        parts = flat.new_empty(ranks * each)
        arrived = self.all_to_all(parts, flat, [each] * ranks, sizes)
        return then(arrived, lambda: torch.sum(parts.view(ranks, each), dim=0, out=own))

    def all_gather(
        self,
        flat: Tensor,
        ranks: Sequence[int],
        rank: int,  # noqa: ARG002
        sizes: Sequence[int],
    ) -> Finish:
        """Fill ``flat`` with the segment of each of ``ranks``; ``rank`` is this one.

        One broadcast of each segment takes a quarter of the time of gloo's own, which copies.
        """
        segments = zip(ranks, torch.split(flat, list(sizes)), strict=True)
        return _all([self.broadcast(each, src) for src, each in segments if each.numel()])

    def gather_parts(self, part: Tensor, flat: Tensor, counts: Sequence[int]) -> Finish:
        """Fill ``flat`` with every rank's part, ``counts[i]`` elements from the ``i``-th rank.

        ``part`` is contiguous; parts may be unequal. Message by message: nothing is copied but
        this rank's own part.
        """
        rooms = torch.split(flat, list(counts))
        me, ranks = self._group.handle.rank(), self._group.ranks
        rooms[me].copy_(part.view(-1))
        others = [number for number in range(len(ranks)) if number != me]
        out = [(ranks[number], part) for number in others]
        return self._at_once(out, [(ranks[n], rooms[n]) for n in others], PARTS_TAG)

    def scatter_sum(
        self, flat: Tensor, own: Tensor, counts: Sequence[int], order: Sequence[int]
    ) -> Finish:
        """``own`` gets the sum over ranks of its part of ``flat``: ``counts[i]`` elements are the
        ``i``-th rank's. Added in the ``order`` given, where the library leaves that to us.
        """
        me, ranks = self._group.handle.rank(), self._group.ranks
        parts = torch.split(flat, list(counts))
        others = [number for number in range(len(ranks)) if number != me]
        arrived = {number: self._room_like(parts[me]) for number in others}
        out = [(ranks[number], parts[number]) for number in others]
        into = [(ranks[number], room) for number, room in arrived.items()]
        terms = [{**arrived, me: parts[me]}[number] for number in order]

        def add() -> None:
            total = own.view(-1)
            torch.add(terms[0], terms[1], out=total)
            for term in terms[2:]:
                total.add_(term)

        return then(self._at_once(out, into, PARTS_TAG), add)

    def exchange(self, sent: Parts, received: Parts, tag: int = PARTS_TAG) -> Finish:
        """Send and receive contiguous tensors, all at once; equal tags arrive in order."""
        return self._at_once(sent, received, tag)

    def send(self, parts: Parts, tag: int) -> Finish:
        """Send contiguous tensors; equal tags arrive in order."""
        return self._at_once(parts, (), tag)

    def receive(self, parts: Parts, tag: int) -> Finish:
        """Receive into contiguous tensors."""
        return self._at_once((), parts, tag)

    def _at_once(self, sent: Parts, received: Parts, tag: int) -> Finish:
        """All messages as one call, where the backend can. Empty ones are not sent."""
        if self._point_to_point == "none":
            return self._in_exchange(sent, received)
        handle, number = self._group.handle, self._group.number
        starts = [
            (way, part, number(peer))
            for way, parts in ((handle.recv, received), (handle.send, sent))
            for peer, part in parts
            if part.numel()
        ]
        if not starts:
            return nothing
        device = starts[0][1].device
        is_ordered = self._point_to_point == "ordered"
        if not (is_ordered and handle._get_backend(device).supports_coalescing):
            return _all([_wait_for(way([part], peer, tag)) for way, part, peer in starts])
        handle._start_coalescing(device)
        for way, part, peer in starts:
            way([part], peer, 0)  # the order tells messages apart
        return _wait_for(handle._end_coalescing(device))

    def _in_exchange(self, sent: Parts, received: Parts) -> Finish:
        """The messages of a collective, at most one from rank to rank, as one all-to-all."""
        ranks, parts, rooms = self._group.ranks, dict(sent), dict(received)
        given, counts = (
            [each[rank].numel() if rank in each else 0 for rank in ranks] for each in (parts, rooms)
        )
        flat = torch.cat([parts[rank].view(-1) for rank in ranks if rank in parts])
        result = flat.new_empty(sum(counts))
        arrived = self.all_to_all(result, flat, counts, given)

        def copy_out() -> None:
            for rank, came in zip(ranks, torch.split(result, counts), strict=True):
                if rank in rooms:
                    rooms[rank].view(-1).copy_(came)

        return then(arrived, copy_out)


class DirectGroup(NativeGroup):
    """Where the library's own collectives on segments are the best: NCCL and its relatives."""

    def reduce_scatter(self, flat: Tensor, own: Tensor, sizes: Sequence[int]) -> Finish:
        if len({*sizes}) > 1:
            return super().reduce_scatter(flat, own, sizes)
        options = ReduceScatterOptions()
        options.reduceOp = ReduceOp(ReduceOp.SUM)
        return _wait_for(self._group.handle._reduce_scatter_base(own, flat, options))

    def all_gather(
        self, flat: Tensor, ranks: Sequence[int], rank: int, sizes: Sequence[int]
    ) -> Finish:
        if len({*sizes}) > 1:
            return super().all_gather(flat, ranks, rank, sizes)
        return self._all_gather(flat, torch.split(flat, list(sizes))[list(ranks).index(rank)])

    def gather_parts(self, part: Tensor, flat: Tensor, counts: Sequence[int]) -> Finish:
        if len(set(counts)) > 1:
            return super().gather_parts(part, flat, counts)
        return self._all_gather(flat, part.view(-1))

    def scatter_sum(
        self, flat: Tensor, own: Tensor, counts: Sequence[int], order: Sequence[int]
    ) -> Finish:
        if len(set(counts)) > 1:
            return super().scatter_sum(flat, own, counts, order)
        return self.reduce_scatter(flat, own.view(-1), counts)

    def _all_gather(self, flat: Tensor, own: Tensor) -> Finish:
        return _wait_for(self._group.handle._allgather_base(flat, own, AllgatherOptions()))


class StagedGroup(NativeGroup):
    """Collectives over gloo on copies in host memory, for ranks that share no other backend."""

    def __init__(self, group: Group, copies: HostCopies) -> None:
        super().__init__(group)
        self._host = NativeGroup(group, room=copies.read_room)
        self._copies = copies

    def all_reduce(self, tensor: Tensor, *, largest: bool) -> Finish:
        begin = self._host.all_reduce
        return self._through(tensor, tensor, lambda host, _: begin(host, largest=largest))

    def broadcast(self, tensor: Tensor, src: int) -> Finish:
        return self._through(tensor, tensor, lambda host, _: self._host.broadcast(host, src))

    def all_to_all(
        self, result: Tensor, flat: Tensor, counts: Sequence[int], given: Sequence[int]
    ) -> Finish:
        begin = self._host.all_to_all
        return self._through(flat, result, lambda host, into: begin(into, host, counts, given))

    def gather_parts(self, part: Tensor, flat: Tensor, counts: Sequence[int]) -> Finish:
        begin = self._host.gather_parts
        return self._through(part, flat, lambda host, into: begin(host, into, counts))

    def scatter_sum(
        self, flat: Tensor, own: Tensor, counts: Sequence[int], order: Sequence[int]
    ) -> Finish:
        begin = self._host.scatter_sum
        return self._through(flat, own, lambda host, into: begin(host, into, counts, order))

    def exchange(self, sent: Parts, received: Parts, tag: int = PARTS_TAG) -> Finish:
        return _all([self.receive(received, tag), self.send(sent, tag)])

    def send(self, parts: Parts, tag: int) -> Finish:
        down = [(peer, *self._copies.down(part, message=True)) for peer, part in parts]
        hosts = [(peer, host) for peer, host, _ in down]
        ready = _all([ready for _, _, ready in down])
        return self._copies.when(ready, lambda: self._host.send(hosts, tag))

    def receive(self, parts: Parts, tag: int) -> Finish:
        taken = [(peer, *self._copies.again(part)) for peer, part in parts]
        rooms = [(peer, room) for peer, room, _ in taken]
        ready = _all([ready for _, _, ready in taken])
        start = self._copies.when(ready, lambda: self._host.receive(rooms, tag))

        def copy_up() -> None:
            for (_, part), (_, room) in zip(parts, rooms, strict=True):
                self._copies.up(room, part)

        return then(start, copy_up)

    def _through(
        self, given: Tensor, result: Tensor, begin: Callable[[Tensor, Tensor], Finish]
    ) -> Finish:
        """``begin`` with both of them on the host, and what comes of ``result`` back up."""
        host, ready = self._copies.down(given)
        into, read = (host, nothing) if result is given else self._copies.room(result)
        start = self._copies.when(_all([ready, read]), lambda: begin(host, into))
        return then(start, lambda: self._copies.up(into, result))


class HostCopies:
    """Copies between a device and host memory, beside what the device computes.

    One thread starts collectives as soon as their copy has reached the host, in the order asked
    for: all ranks start the calls of a group in one order, and nobody waits for a device.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_host = device.type == "cpu"
        self._side = None if self._is_host else torch.Stream(device=device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="host copies")
        self.rooms = ReusedMemory(torch.device("cpu"), is_pinned=not self._is_host)
        """For messages: to make page-locked memory may wait for all that a device was asked."""
        self.calls = ReusedMemory(torch.device("cpu"), is_pinned=not self._is_host)
        """For other collectives, whose sizes may change: by the next power of two in bytes."""
        self._leaving: dict[int, torch.Event] = {}
        """By place: when a device has read what is there."""

    def reserve(self, likes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Make rooms so that as many can be in use at once."""
        _ = [self.rooms.take(size, dtype) for size, dtype in likes]

    def again(self, like: Tensor) -> tuple[Tensor, Finish]:
        """A room that may have been used before, and how to wait until it may be written to."""
        room = self.rooms.take(tuple(like.shape), like.dtype)
        read = self._leaving.pop(room.data_ptr(), None)
        return room, nothing if read is None else read.synchronize

    def up(self, room: Tensor, tensor: Tensor) -> None:
        """Copy to the device, beside what the host does."""
        tensor.copy_(room, non_blocking=True)
        if self._side is not None:
            stream = torch.accelerator.current_stream(tensor.device)
            self._leaving[room.data_ptr()] = stream.record_event()

    def room(self, like: Tensor) -> tuple[Tensor, Finish]:
        """The same for a collective that is no message."""
        room = self._room(like)
        read = self._leaving.pop(room.data_ptr(), None)
        return room, nothing if read is None else read.synchronize

    def read_room(self, like: Tensor) -> Tensor:
        """One that may be written to: for the thread, which may wait."""
        room, read = self.room(like)
        read()
        return room

    def _room(self, like: Tensor) -> Tensor:
        num_bytes = like.numel() * like.element_size()
        memory = self.calls.take((1 << (num_bytes - 1).bit_length(),), torch.uint8)
        return memory[:num_bytes].view(like.dtype).view(like.shape)

    def down(self, tensor: Tensor, *, message: bool = False) -> tuple[Tensor, Finish]:
        """A copy on the host, and how to wait until it is there."""
        size = tuple(tensor.shape)
        host = self.rooms.take(size, tensor.dtype) if message else self._room(tensor)
        if self._side is None:
            host.copy_(tensor)
            return host, nothing
        read = self._leaving.pop(host.data_ptr(), None)
        if read is not None:
            self._side.wait_event(read)
        self._side.wait_stream(torch.accelerator.current_stream(tensor.device))
        with self._side:
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._side)
        return host, self._side.record_event().synchronize

    def when(self, ready: Finish, call: Callable[[], Finish]) -> Finish:
        """Do ``call`` once ``ready`` returned; what is returned waits for the call's own end.

        Once that ended nothing here refers to what they use.
        """
        both = [(ready, call)]

        def start() -> Finish:
            ready, call = both.pop()
            ready()
            return call()

        future = self._thread.submit(start)

        def finish() -> None:
            future.result()()

        return finish

    def close(self, *, wait: bool) -> None:
        """End the thread; with ``wait`` return when it has ended."""
        self._thread.shutdown(wait=wait, cancel_futures=True)


def _new(like: Tensor) -> Tensor:
    return torch.empty_like(like)


def _wait_for(work: Any) -> Finish:
    """Once waited for, a call is let go of: it would keep its group's sockets open."""
    pending = [work]

    def finish() -> None:
        for each in pending:
            each.wait()
        pending.clear()

    return finish


def _all(finishes: Sequence[Finish]) -> Finish:
    def finish() -> None:
        for each in finishes:
            each()

    return finish


def then(first: Finish, second: Callable[[], object]) -> Finish:
    """One after the other."""

    def finish() -> None:
        first()
        second()

    return finish


def nothing() -> None:
    """There is nothing to wait for."""
