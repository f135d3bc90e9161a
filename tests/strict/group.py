"""A library of collectives for tests: ``torch.distributed``'s interface to the strict server.

Ranks of processors and of the fake chip talk through it. Sums are added in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from strict.client import Client, place
from strict.memory import HostMemory, Lent, Memory, to_tensor
from strict.rules import Call, Header, Message
from strict.server import Where
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, ReduceOp, Store, Work

from weft.comm.address import RankAddress
from weft.platform.registry import platform_named

BACKEND = "strict"
_SESSION: list[tuple[Client, Memory]] = []
"""Of the job that this process is in."""


class StrictWork(Work):
    """One call. Whoever waits lets the stream that is current wait."""

    def __init__(self, group: StrictGroup, number: int, lent: Lent) -> None:
        super().__init__()
        self._group, self._number, self._lent = group, number, lent

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._lent.is_over:
            self._group.client.wait(self._group.key, self._number, place())
        self._lent.join()
        return True


class StrictGroup(ProcessGroup):
    """One communicator of one rank."""

    supports_coalescing = True

    def __init__(self, store: Store, number: int, size: int) -> None:
        super().__init__(number, size)
        self.client, self._memory = _SESSION[-1]
        store.set(f"strict/{number}", str(self.client.rank))
        self._ranks = tuple(int(store.get(f"strict/{each}")) for each in range(size))
        self.key, self._stream = self.client.name(self._ranks)
        self._batch: list[tuple[Tensor, Message]] | None = None

    def _get_backend(self, device: torch.device) -> StrictGroup:
        return self

    def getBackendName(self) -> str:  # noqa: N802 - as PyTorch calls it
        return BACKEND

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass

    # --- collectives ---

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Work:
        (tensor,) = tensors
        largest = options is not None and options.reduceOp == ReduceOp.MAX

        def made(parts: list[Tensor]) -> list[Tensor]:
            return [_together(parts, largest=largest)]

        header = _header("all_reduce", tensor, " (largest)" if largest else "")
        return self._collective(header, tensor, [tensor], made)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Work:
        (tensor,), root = tensors, options.rootRank
        rooms = [] if self.rank() == root else [tensor]
        header = _header("broadcast", tensor, f" from rank {self._ranks[root]}")
        return self._collective(header, tensor, rooms, lambda parts: [parts[root]])

    def _allgather_base(self, flat: Tensor, own: Tensor, options: Any = None) -> Work:
        """A rank's own part of ``flat`` stays as it is where that is what it gives."""
        assert flat.numel() == own.numel() * self.size()
        parts = dict(enumerate(flat.view(self.size(), -1)))
        if parts[self.rank()].data_ptr() == own.data_ptr():
            del parts[self.rank()]

        def made(given: list[Tensor]) -> list[Tensor]:
            return [given[number] for number in parts]

        return self._collective(_header("all_gather", own), own, list(parts.values()), made)

    def _reduce_scatter_base(self, own: Tensor, flat: Tensor, options: Any = None) -> Work:
        assert flat.numel() == own.numel() * self.size()
        mine = slice(self.rank() * own.numel(), (self.rank() + 1) * own.numel())

        def made(parts: list[Tensor]) -> list[Tensor]:
            return [_together([part[mine] for part in parts], largest=False)]

        return self._collective(_header("reduce_scatter", flat), flat, [own], made)

    def alltoall_base(
        self, result: Tensor, flat: Tensor, counts: list[int], given: list[int], options: Any = None
    ) -> Work:
        """Counts differ between ranks: messages to and from all of them, at once."""
        into, out = torch.split(result, counts), torch.split(flat, given)
        me = self.rank()
        into[me].copy_(out[me])
        self._start_coalescing(flat.device)
        for number in range(self.size()):
            if number != me and counts[number]:
                self.recv([into[number]], number, 0)
            if number != me and given[number]:
                self.send([out[number]], number, 0)
        return self._end_coalescing(flat.device)

    # --- messages ---

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        return self._message(tensors[0], peer, sends=True)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        return self._message(tensors[0], peer, sends=False)

    def _start_coalescing(self, device: torch.device) -> None:
        assert self._batch is None, "coalescing has begun already"
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Work:
        batch, self._batch = self._batch, None
        assert batch is not None, "coalescing has not begun"
        return self._messages(batch)

    def _message(self, tensor: Tensor, peer: int, *, sends: bool) -> Any:
        message = Message(sends, self._ranks[peer], _header("message", tensor))
        if self._batch is not None:
            self._batch.append((tensor, message))
            return None
        return self._messages([(tensor, message)])

    def _messages(self, batch: Sequence[tuple[Tensor, Message]]) -> Work:
        call = Call(self.key, self._stream, place(), messages=[message for _, message in batch])
        given = [tensor for tensor, message in batch if message.sends]
        taken = [tensor for tensor, message in batch if not message.sends]
        lent = self._memory.lend(str(call), self._stream, given=given, taken=taken)
        sent = iter(lent.data)
        data = [next(sent) if message.sends else b"" for _, message in batch]

        def arrive(parts: list[bytes | None]) -> None:
            came = [part for part in parts if part is not None]
            lent.arrive([to_tensor(p, t.dtype) for p, t in zip(came, taken, strict=True)])

        return StrictWork(self, self.client.post(replace(call, data=data), arrive), lent)

    def _collective(
        self,
        header: Header,
        given: Tensor,
        taken: Sequence[Tensor],
        made: Callable[[list[Tensor]], list[Tensor]],
    ) -> Work:
        call = Call(self.key, self._stream, place(), header)
        lent = self._memory.lend(str(call), self._stream, given=[given], taken=taken)

        def arrive(parts: list[bytes]) -> None:
            lent.arrive(made([to_tensor(part, given.dtype) for part in parts]) if taken else [])

        return StrictWork(self, self.client.post(replace(call, data=lent.data), arrive), lent)


def _header(kind: str, tensor: Tensor, detail: str = "") -> Header:
    return Header(kind, tensor.numel(), str(tensor.dtype).removeprefix("torch."), detail)


def _together(terms: Sequence[Tensor], *, largest: bool) -> Tensor:
    """The sum, or the largest, in the order of ranks."""
    total = terms[0].clone()
    for term in terms[1:]:
        torch.maximum(total, term, out=total) if largest else total.add_(term)
    return total


def groups_opened() -> set[tuple[int, ...]]:
    """Ranks of the communicators that this process's job opened."""
    return set(_SESSION[-1][0].names())


def make_group(store: Store, number: int, size: int, timeout: timedelta) -> ProcessGroup:
    return StrictGroup(store, number, size)


@contextmanager
def session(address: RankAddress, where: Where, family: str, memory: Memory) -> Iterator[None]:
    """Ranks of this family talk through the strict server meanwhile."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, make_group, devices=[family])
    client = Client(address.rank, where)
    _SESSION.append((client, memory))
    try:
        with mock.patch.multiple(
            platform_named(family),
            create=True,
            collective_backend=BACKEND,
            point_to_point="ordered",
        ):
            yield
    finally:
        _SESSION.pop()
        client.close()


def on_processors(address: RankAddress, where: Where, job: Callable[..., Any], *args: Any) -> Any:
    """``job(address, *args)`` on a rank whose processor talks through the strict server."""
    with session(address, where, "cpu", HostMemory()):
        return job(address, *args)
