"""Every collective of a job goes through here: it has a name, a group, a count, a clear error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import Channel
from weft.comm.counters import Counters
from weft.comm.errors import CommError

Handle = dist.ProcessGroup
Finish = Callable[[], None]
"""Call it to wait for an asynchronous collective."""
Parts = Sequence[tuple[int, Tensor]]
"""Tensors, each with the rank it goes to or comes from."""


class Comm:
    """The groups of one job and the collectives over them.

    Every rank must name the same groups in the same order in ``open_groups``: group creation is
    itself collective. A group of one rank, and a job of one process, send nothing.
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, device: str | torch.device = "cpu"
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.world = tuple(range(world_size))
        self.counters = Counters()
        self._handles: dict[tuple[int, ...], Handle | None] = {self.world: None}

    def open_groups(self, groups: Iterable[tuple[int, ...]], timeout_s: float) -> None:
        """Create the groups that do not exist yet. Collective."""
        for ranks in groups:
            if len(ranks) > 1 and ranks not in self._handles:
                timeout = timedelta(seconds=timeout_s)
                self._handles[ranks] = dist.new_group(list(ranks), timeout=timeout)

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
        self._count(name, 2 * (len(ranks) - 1) / len(ranks) * tensor.nbytes, ranks)
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        handle = self._handles[ranks]
        work = self._run(
            name, ranks, lambda: dist.all_reduce(tensor, op, group=handle, async_op=True)
        )
        return self._finish(name, ranks, work, wait=wait)

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
        others = len(parts) - 1
        sent = sum(part.nbytes for part in parts) - parts[group.index(self.rank)].nbytes
        self.counters.add(name, sent if others else 0, tuple(r for r in group if r != self.rank))
        ascending = sorted(range(len(group)), key=group.__getitem__)  # as PyTorch numbers them
        flat = torch.cat([parts[i].reshape(-1) for i in ascending])
        counts = [prod(sizes[i]) for i in ascending]
        result = torch.empty(sum(counts), dtype=flat.dtype, device=flat.device)
        given = [parts[i].numel() for i in ascending]
        handle = self._handles[group]
        self._run(
            name, group, lambda: dist.all_to_all_single(result, flat, counts, given, group=handle)
        )
        pieces = dict(zip(ascending, torch.split(result, counts), strict=True))
        return [pieces[i].view(*size) for i, size in enumerate(sizes)]

    def reduce_scatter(
        self, flat: Tensor, own: Tensor, *, name: str, group: tuple[int, ...]
    ) -> Finish:
        """Start to sum ``flat`` ``[ranks x n]`` over the group; each rank's segment goes to it.

        Partial -> Shard. ``own`` ``[n]`` holds the sum, added in rank order, when the result was
        called; ``flat`` must not change before. The group names its ranks in ascending order.
        """
        size = len(group)
        assert flat.numel() == size * own.numel(), f"{flat.numel()} elements for {size} ranks"
        self._count(name, (size - 1) / size * flat.nbytes, group)
        handle = self._handles[group]
        parts = torch.empty_like(flat)  # gloo's own reduce-scatter takes almost twice the time
        work = self._run(
            name,
            group,
            lambda: dist.all_to_all_single(parts, flat, group=handle, async_op=True),
        )
        arrived = self._finish(name, group, work, wait=False)

        def finish() -> None:
            arrived()
            torch.sum(parts.view(size, -1), dim=0, out=own)

        return finish

    def all_gather(self, flat: Tensor, *, name: str, group: tuple[int, ...]) -> Finish:
        """Start to fill ``flat`` ``[ranks x n]``, in place, with every rank's own segment of it.

        Shard -> Replicate. ``flat`` is valid when the result was called. The group names its ranks
        in ascending order.
        """
        size = len(group)
        self._count(name, (size - 1) / size * flat.nbytes, group)
        handle = self._handles[group]
        finishes = []
        # One broadcast of each segment: a quarter of the time of gloo's own all-gather.
        for src, segment in zip(group, flat.view(size, -1), strict=True):
            send = partial(dist.broadcast, segment, src, group=handle, async_op=True)
            work = self._run(name, group, send)
            finishes.append(self._finish(name, group, work, wait=False))

        def finish() -> None:
            for each in finishes:
                each()

        return finish

    def broadcast(
        self, tensor: Tensor, *, src: int, name: str, group: tuple[int, ...] | None = None
    ) -> None:
        """Copy ``tensor`` of rank ``src`` into every rank's, in place."""
        ranks = self.world if group is None else group
        if len(ranks) == 1:
            return
        self._count(name, tensor.nbytes if self.rank == src else 0.0, ranks)
        handle = self._handles[ranks]
        work = self._run(
            name, ranks, lambda: dist.broadcast(tensor, src, group=handle, async_op=True)
        )
        self._finish(name, ranks, work, wait=True)

    def send(self, parts: Parts, *, channel: Channel, name: str) -> Finish:
        """Start to send contiguous tensors, each to the rank beside it, over a channel.

        They must not change until the result was called.
        """
        for dst, part in parts:
            self.counters.add(name, part.nbytes, (dst,))
        return self._point_to_point(dist.isend, parts, channel, name)

    def receive(self, parts: Parts, *, channel: Channel, name: str) -> Finish:
        """Start to receive into contiguous tensors, each from the rank beside it.

        They are valid when the result was called. What comes from one rank over one channel is
        received in the order in which it was sent.
        """
        return self._point_to_point(dist.irecv, parts, channel, name)

    def _point_to_point(
        self, operation: Callable[..., Any], parts: Parts, channel: Channel, name: str
    ) -> Finish:
        peers = tuple(sorted({peer for peer, _ in parts}))
        works = [
            self._run(name, peers, partial(operation, part, peer, tag=channel.number))
            for peer, part in parts
        ]

        def finish() -> None:
            for work in works:
                self._run(name, peers, work.wait)

        return finish

    def gather_json(self, value: Any, *, name: str) -> list[Any]:
        """Every rank's ``value``, in rank order, on every rank. JSON on the wire, never pickle."""
        text = json.dumps(value).encode()
        if self.world_size == 1:
            return [json.loads(text)]
        size = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        size[self.rank] = len(text)
        self.all_reduce(size, name=name)
        longest = int(size.max())
        table = torch.zeros(self.world_size, longest, dtype=torch.uint8, device=self.device)
        table[self.rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.all_reduce(table, name=name)
        rows = table.cpu().numpy()
        return [json.loads(rows[r, : int(n)].tobytes()) for r, n in enumerate(size.tolist())]

    def barrier(self, *, name: str) -> None:
        """Return when every rank of the job has come here."""
        flag = torch.zeros(1, device=self.device)
        self.all_reduce(flag, name=name)
        flag.item()  # where collectives are queued, only a value read back makes this process wait

    def close(self) -> None:
        """Leave the job."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _count(self, name: str, num_bytes: float, ranks: tuple[int, ...]) -> None:
        self.counters.add(name, num_bytes, tuple(r for r in ranks if r != self.rank))

    def _finish(self, name: str, ranks: tuple[int, ...], work: Any, *, wait: bool) -> Finish:
        def finish() -> None:
            self._run(name, ranks, work.wait)

        if wait:
            finish()
            return _nothing
        return finish

    def _run(self, name: str, ranks: tuple[int, ...], call: Callable[[], Any]) -> Any:
        """Run one step of a collective, and say in an error which one it was and with whom."""
        try:
            return call()
        except RuntimeError as error:
            peers = ", ".join(str(r) for r in ranks if r != self.rank)
            text = str(error).splitlines()[0]
            message = f"rank {self.rank}: {name} with rank(s) {peers} failed: {text}"
            raise CommError(message) from error


def _nothing() -> None:
    """There is nothing to wait for."""
