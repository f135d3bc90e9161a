"""What all ranks do goes through few neighbours, however many they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed import HashStore

from weft.comm.comm import Comm
from weft.comm.groups import Groups
from weft.comm.members import Channel
from weft.comm.tree import blocks

T = TypeVar("T")
FEW, MANY = 4, 19
TIMEOUT_S = 600.0


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few ranks make a tree of three levels."""
    for module in ("weft.comm.tree", "weft.comm.comm"):
        monkeypatch.setattr(f"{module}.FAN", 3)


def on_ranks(world_size: int, rank_main: Callable[[Comm], T]) -> list[T]:
    """Ranks as threads of this process."""
    store = HashStore()

    def main(rank: int) -> T:
        groups = Groups(store, rank, torch.device("cpu"), timeout_s=TIMEOUT_S, is_local=True)
        with Comm(rank, world_size, groups=groups, timeout_s=TIMEOUT_S) as comm:
            comm.open_groups([])
            comm.barrier(name="all here")
            return rank_main(comm)

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(main, range(world_size)))


@pytest.mark.parametrize("world_size", [2, 3, 4, 9, 10, 28, 81, 1024])
def test_every_rank_has_one_way_up(world_size: int) -> None:
    groups = [blocks(rank, world_size) for rank in range(world_size)]
    for rank, mine in enumerate(groups):
        assert all(group[0] == rank for group in mine[:-1])
        assert all(rank in group and len(group) <= 3 for group in mine)
        assert rank == 0 or mine[-1][0] < rank, "somebody stands for it"
    assert len(groups[0]) <= 7  # log3 of 1024


def test_all_ranks_hear_all() -> None:
    long = "é" * 1000

    def rank_main(comm: Comm) -> list[Any]:
        rank = comm.rank
        total, most, copied = torch.tensor([1.0, rank]), torch.tensor([-rank]), torch.tensor([rank])
        comm.all_reduce(total, name="total")
        comm.all_reduce(most, name="most", largest=True)
        comm.broadcast(copied, src=0, name="copy")
        said = [
            comm.gather_json(value, name="facts")
            for value in (rank, "same", long, long if rank % 5 else [rank, long], {"a": rank // 7})
        ]
        return [total.tolist(), most.tolist(), copied.tolist(), *said]

    for world_size in (FEW, MANY):
        ranks = range(world_size)
        expected = [
            [world_size, sum(ranks)],
            [0],
            [0],
            list(ranks),
            ["same"] * world_size,
            [long] * world_size,
            [long if rank % 5 else [rank, long] for rank in ranks],
            [{"a": rank // 7} for rank in ranks],
        ]
        assert on_ranks(world_size, rank_main) == [expected] * world_size


def test_what_a_rank_sends_hardly_grows_with_ranks() -> None:
    """A long text that all say alike goes nowhere; a rank has few neighbours."""
    text = json.dumps(list(range(20_000)))

    def rank_main(comm: Comm) -> tuple[float, int, int]:
        comm.counters.take()
        comm.gather_json(text, name="plan")
        comm.barrier(name="begin")
        assert comm.groups is not None
        plan = comm.counters["plan"]
        return plan.bytes, len(plan.peers), len(comm.groups)

    few, many = on_ranks(FEW, rank_main), on_ranks(MANY, rank_main)
    assert max(sent for sent, _, _ in many) < 2000 < len(text)
    assert max(sent for sent, _, _ in many) < 3 * max(sent for sent, _, _ in few)
    assert max(peers for _, peers, _ in many) <= 3 * 2, "three levels of three ranks"
    assert sorted(groups for _, _, groups in many)[MANY // 2] == 1, "most are in one group"


def test_messages_between_two_ranks_need_no_group_of_all() -> None:
    def rank_main(comm: Comm) -> float:
        channel = Channel((4, 7), 2)
        comm.open_channels([channel])
        part = torch.tensor([float(comm.rank)])
        if comm.rank == 4:
            comm.send([(7, part)], channel=channel, name="on")()
        if comm.rank == 7:
            comm.receive([(4, part)], channel=channel, name="on")()
        return part.item()

    found = on_ranks(9, rank_main)
    assert found[7] == 4
