"""The strict backend between processes: every collective, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from comm.test_transports import collectives, numbers
from comm.test_transports import run as over_gloo
from strict.group import on_processors
from strict.rules import Rules
from strict.server import Server

from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.comm.members import Channel
from weft.comm.transport import DirectGroup
from weft.elastic.failure import RanksFailedError
from weft.elastic.pool import WorkerPool
from weft.platform.registry import platform_named


def joined(address: RankAddress) -> Comm:
    backend = platform_named("cpu").collective_backend
    comm = join(address, backend=backend, device=torch.device("cpu"), timeout_s=600)
    comm.open_groups([])
    comm.open_gathering([comm.world])
    comm.open_channels([Channel(comm.world, number) for number in (4, 5)])
    return comm


def line(comm: Comm, group: tuple[int, ...]) -> list[torch.Tensor]:
    """Two messages from rank to rank; in a ring, receives before sends would wait for ever."""
    way, rooms = Channel(group, 4), [torch.empty(6), torch.empty(6)]
    if comm.rank:
        finishes = [comm.receive([(comm.rank - 1, r)], channel=way, name="line") for r in rooms]
        for finish in finishes:
            finish()
    if comm.rank + 1 < len(group):
        values = numbers(comm.rank, 12).view(2, 6)
        finishes = [comm.send([(comm.rank + 1, v)], channel=way, name="line") for v in values]
        finishes[-1]()
    return rooms if comm.rank else []


def every_collective(address: RankAddress) -> tuple[dict[str, list[list[float]]], str]:
    comm = joined(address)
    with mock.patch("comm.test_transports.ring", line):
        found = collectives(comm, comm.world)
    kind = type(comm._group(comm.world)).__name__
    comm.close()
    return {name: [t.tolist() for t in tensors] for name, tensors in found.items()}, kind


def test_every_collective_with_sums_in_the_order_of_ranks(pool: WorkerPool) -> None:
    native = pool.run(over_gloo, ("gloo",) * 3, (0, 1, 2), world_size=3)
    with Server(Rules(queues=1, seed=3)) as server:
        strict = pool.run(on_processors, server.where, every_collective, world_size=3)
    terms = [numbers(rank, 7) for rank in range(3)]
    total = (terms[0] + terms[1] + terms[2]).tolist()
    for rank, (found, kind) in enumerate(strict):
        expected = native[rank][0]
        assert kind == DirectGroup.__name__
        assert found.keys() == expected.keys()
        assert found["all_reduce"][0] == total
        for name, values in found.items():
            if name == "received":
                assert values == [v.tolist() for v in numbers(rank - 1, 12).view(2, 6)[: 2 * rank]]
                continue
            same = name.startswith(("broadcast", "exchange", "gather_parts"))
            for mine, theirs in zip(values, expected[name], strict=True):
                assert mine == theirs if same else np.allclose(mine, theirs, rtol=1e-3), name


def two_sums(comm: Comm) -> None:
    """One rank in another order than the other."""
    sizes = (3, 5) if comm.rank else (5, 3)
    for size in sizes:
        comm.all_reduce(torch.zeros(size), name="sum", wait=False)
    comm.all_reduce(torch.zeros(1), name="last")


def head_on(comm: Comm) -> None:
    """Both send over the channel on which they receive."""
    channel, other = Channel(comm.world, 4), 1 - comm.rank
    comm.send([(other, torch.zeros(3))], channel=channel, name="there")
    comm.receive([(other, torch.zeros(3))], channel=channel, name="back")()


def changed(comm: Comm) -> None:
    """What is sent changes before it has left."""
    channel, tensor = Channel(comm.world, 4), torch.zeros(3)
    if comm.rank:
        comm.receive([(0, tensor)], channel=channel, name="there")()
        return
    finish = comm.send([(1, tensor)], channel=channel, name="there")
    tensor += 1
    finish()


def read_early(comm: Comm) -> None:
    """What is received is added to before it has come."""
    channel, tensor = Channel(comm.world, 4), torch.zeros(3)
    if comm.rank:
        finish = comm.receive([(0, tensor)], channel=channel, name="there")
        assert tensor.isnan().all()
        tensor.fill_(1.0)
        finish()
        return
    comm.send([(1, tensor)], channel=channel, name="there")()


def lonely(comm: Comm) -> None:
    if comm.rank == 0:
        comm.receive([(1, torch.zeros(3))], channel=Channel(comm.world, 4), name="there")()


WRONG: list[tuple[Callable[[Comm], None], list[str]]] = [
    (two_sums, ["mismatch: ", "all_reduce of 3 float32", "all_reduce of 5 float32", "two_sums"]),
    (head_on, ["deadlock: ", "rank 0: send of 3", "rank 1: send of 3", "head_on"]),
    (changed, ["memory was changed before anybody waited for the send of 3 float32 to rank 1"]),
    (read_early, ["memory was written before anybody waited for the receive of 3 float32"]),
    (lonely, ["rank 1 has left the job: ", "receive of 3 float32 from rank 1", "lonely"]),
]


def go_wrong(address: RankAddress, number: int) -> Any:
    comm = joined(address)
    try:
        WRONG[number][0](comm)
    finally:
        comm.close(abort=True)


@pytest.mark.parametrize("number", range(len(WRONG)), ids=lambda n: WRONG[n][0].__name__)
def test_what_is_wrong_is_named(number: int, pool: WorkerPool) -> None:
    words = WRONG[number][1]
    with (
        Server(Rules(queues=8, seed=0)) as server,
        pytest.raises(RanksFailedError) as caught,
    ):
        pool.run(on_processors, server.where, go_wrong, number, world_size=2)
    said = "\n".join(failure.message for failure in caught.value.failures)
    for word in words:
        assert word in said, said
