"""Slow work is waited for; a lost rank is not."""

import time

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.join import join
from weft.comm.place import Place
from weft.comm.together import together
from weft.elastic.pool import WorkerPool
from weft.elastic.processes import RanksFailedError

TIMEOUT_S = 1.5


def works_for_long(place: Place) -> str:
    """Rank 1 works for longer than a collective may take."""
    comm = join(place, backend="gloo", device=torch.device("cpu"), timeout_s=TIMEOUT_S)

    def work() -> str:
        time.sleep(2 * TIMEOUT_S if place.rank == 1 else 0)
        return f"done by {place.rank}"

    result = together(comm, work, name="work")
    comm.close()
    return result


def test_work_may_last_longer_than_a_collective(pool: WorkerPool) -> None:
    assert pool.run(works_for_long, world_size=3) == [f"done by {r}" for r in range(3)]


def fails_at_work(place: Place) -> None:
    comm = join(place, backend="gloo", device=torch.device("cpu"), timeout_s=TIMEOUT_S)
    if place.rank == 0:
        comm.close()
        return
    together(comm, lambda: None, name="work")


def test_a_lost_rank_is_not_waited_for(pool: WorkerPool) -> None:
    with pytest.raises(RanksFailedError, match=r"rank 1: CommError: rank 1: work with rank\(s\) 0"):
        pool.run(fails_at_work, world_size=2)


def test_alone() -> None:
    assert together(Comm(), lambda: 3, name="work") == 3
