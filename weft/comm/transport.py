"""How the ranks of one group really talk: natively, or through host memory.

Both do the same collectives with the same algorithms, so that the numbers do not depend on it.
Every method starts something; what it returns waits for its end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

try:  # their names from torch 2.13 on; the older ones warn there
    from torch.distributed import all_gather_single as gather_whole
    from torch.distributed import reduce_scatter_single as scatter_sum
except ImportError:
    from torch.distributed import all_gather_into_tensor as gather_whole
    from torch.distributed import reduce_scatter_tensor as scatter_sum

Handle = dist.ProcessGroup
Finish = Callable[[], None]
"""Call it to wait for an asynchronous collective."""
Parts = Sequence[tuple[int, Tensor]]
"""Tensors, each with the rank it goes to or comes from."""


class Transport(ABC):
    """The collectives of one group. ``src``, ``dst`` and peers are ranks of the job."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, *, largest: bool) -> Finish:
        """Sum, or take the largest, in place."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int) -> Finish:
        """Copy ``src``'s values into every rank's tensor."""

    @abstractmethod
    def all_to_all(
        self, result: Tensor, flat: Tensor, counts: Sequence[int], given: Sequence[int]
    ) -> Finish:
        """``given[i]`` elements of ``flat`` go to the ``i``-th rank; ``counts[i]`` come from it."""

    def reduce_scatter(self, flat: Tensor, own: Tensor, size: int) -> Finish:
        """``own`` gets this rank's segment of the sum of ``flat``, added in rank order.

        Gloo's own takes almost twice the time of an exchange and a sum.
        """
        parts = torch.empty_like(flat)
        even = [own.numel()] * size
        arrived = self.all_to_all(parts, flat, even, even)
        return _then(arrived, lambda: torch.sum(parts.view(size, -1), dim=0, out=own))

    def all_gather(self, flat: Tensor, ranks: Sequence[int], rank: int) -> Finish:  # noqa: ARG002
        """Fill ``flat`` with the segment of each of ``ranks``; ``rank`` is this one.

        One broadcast of each segment takes a quarter of the time of gloo's own, which copies.
        """
        segments = flat.view(len(ranks), -1)
        pairs = zip(ranks, segments, strict=True)
        return _all([self.broadcast(segment, src) for src, segment in pairs])

    @abstractmethod
    def send(self, parts: Parts, tag: int) -> Finish:
        """Send contiguous tensors; equal tags arrive in order."""

    @abstractmethod
    def receive(self, parts: Parts, tag: int) -> Finish:
        """Receive into contiguous tensors."""


class NativeGroup(Transport):
    """Collectives of PyTorch on the tensors themselves."""

    def __init__(self, handle: Handle | None) -> None:
        self._handle = handle

    def all_reduce(self, tensor: Tensor, *, largest: bool) -> Finish:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        return _wait_for(dist.all_reduce(tensor, op, group=self._handle, async_op=True))

    def broadcast(self, tensor: Tensor, src: int) -> Finish:
        return _wait_for(dist.broadcast(tensor, src, group=self._handle, async_op=True))

    def all_to_all(
        self, result: Tensor, flat: Tensor, counts: Sequence[int], given: Sequence[int]
    ) -> Finish:
        work = dist.all_to_all_single(
            result, flat, list(counts), list(given), group=self._handle, async_op=True
        )
        return _wait_for(work)

    def send(self, parts: Parts, tag: int) -> Finish:
        return self._at_once(dist.isend, parts, tag)

    def receive(self, parts: Parts, tag: int) -> Finish:
        return self._at_once(dist.irecv, parts, tag)

    def _at_once(self, way: Callable[..., Any], parts: Parts, tag: int) -> Finish:
        """All parts as one call, where the backend can."""
        ops = [dist.P2POp(way, part, peer, self._handle, tag) for peer, part in parts]
        works = dist.batch_isend_irecv(ops)

        def finish() -> None:
            for work in works:
                work.wait()

        return finish


class DirectGroup(NativeGroup):
    """Where the library's own collectives on segments are the best: NCCL and its relatives."""

    def reduce_scatter(self, flat: Tensor, own: Tensor, size: int) -> Finish:  # noqa: ARG002
        return _wait_for(scatter_sum(own, flat, group=self._handle, async_op=True))

    def all_gather(self, flat: Tensor, ranks: Sequence[int], rank: int) -> Finish:
        own = flat.view(len(ranks), -1)[list(ranks).index(rank)]
        return _wait_for(gather_whole(flat, own, group=self._handle, async_op=True))


class StagedGroup(Transport):
    """Collectives over gloo on copies in host memory, for ranks that share no other backend."""

    def __init__(self, handle: Handle | None, copies: HostCopies) -> None:
        self._native = NativeGroup(handle)
        self._copies = copies

    def all_reduce(self, tensor: Tensor, *, largest: bool) -> Finish:
        host, ready = self._copies.down(tensor)
        start = self._copies.when(ready, lambda: self._native.all_reduce(host, largest=largest))
        return _then(start, lambda: tensor.copy_(host, non_blocking=True))

    def broadcast(self, tensor: Tensor, src: int) -> Finish:
        host, ready = self._copies.down(tensor)
        start = self._copies.when(ready, lambda: self._native.broadcast(host, src))
        return _then(start, lambda: tensor.copy_(host, non_blocking=True))

    def all_to_all(
        self, result: Tensor, flat: Tensor, counts: Sequence[int], given: Sequence[int]
    ) -> Finish:
        host, ready = self._copies.down(flat)
        into = self._copies.room(result)
        start = self._copies.when(ready, lambda: self._native.all_to_all(into, host, counts, given))
        return _then(start, lambda: result.copy_(into, non_blocking=True))

    def send(self, parts: Parts, tag: int) -> Finish:
        down = [(peer, *self._copies.down(part)) for peer, part in parts]
        hosts = [(peer, host) for peer, host, _ in down]
        readies = [ready for _, _, ready in down]

        def ready() -> None:
            for each in readies:
                each()

        return self._copies.when(ready, lambda: self._native.send(hosts, tag))

    def receive(self, parts: Parts, tag: int) -> Finish:
        rooms = [(peer, self._copies.room(part)) for peer, part in parts]
        start = self._copies.when(_nothing, lambda: self._native.receive(rooms, tag))

        def copy_up() -> None:
            for (_, part), (_, room) in zip(parts, rooms, strict=True):
                part.copy_(room, non_blocking=True)

        return _then(start, copy_up)


class HostCopies:
    """Copies between a device and host memory, beside what the device computes.

    One thread starts collectives as soon as their copy has reached the host, in the order asked
    for: all ranks start the calls of a group in one order, and nobody waits for a device.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_host = device.type == "cpu"
        self._side = None if self._is_host else torch.Stream(device=device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="host copies")

    def room(self, like: Tensor) -> Tensor:
        """Host memory of a tensor's shape, page-locked where a device copies from it."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=not self._is_host)

    def down(self, tensor: Tensor) -> tuple[Tensor, Finish]:
        """A copy on the host, and how to wait until it is there."""
        host = self.room(tensor)
        if self._side is None:
            host.copy_(tensor)
            return host, _nothing
        self._side.wait_stream(torch.accelerator.current_stream(tensor.device))
        with self._side:
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._side)
        return host, self._side.record_event().synchronize

    def when(self, ready: Finish, call: Callable[[], Finish]) -> Finish:
        """Do ``call`` once ``ready`` returned; what is returned waits for the call's own end."""

        def start() -> Finish:
            ready()
            return call()

        future = self._thread.submit(start)

        def finish() -> None:
            future.result()()

        return finish

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _wait_for(work: Any) -> Finish:
    def finish() -> None:
        work.wait()

    return finish


def _all(finishes: Sequence[Finish]) -> Finish:
    def finish() -> None:
        for each in finishes:
            each()

    return finish


def _then(first: Finish, second: Callable[[], object]) -> Finish:
    def finish() -> None:
        first()
        second()

    return finish


def _nothing() -> None:
    """There is nothing to wait for."""
