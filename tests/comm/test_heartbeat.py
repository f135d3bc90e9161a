"""Slow work is waited for; a lost rank is not."""

import time

import pytest
import torch
from limits import within_some_limit

from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.heartbeat import with_heartbeat
from weft.comm.join import join
from weft.elastic.failure import RanksFailedError
from weft.elastic.pool import WorkerPool


def works_for_long(address: RankAddress, limit_s: float) -> str:
    """Rank 1 works for longer than a collective may take."""
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=limit_s)

    def work() -> str:
        time.sleep(2 * limit_s if address.rank == 1 else 0)
        return f"done by {address.rank}"

    result = with_heartbeat(comm, work, name="work")
    comm.close()
    return result


def test_work_may_last_longer_than_a_collective(pool: WorkerPool) -> None:
    def attempt(limit_s: float) -> list[str]:
        return pool.run(works_for_long, limit_s, world_size=3)

    assert within_some_limit(attempt, 2.0) == [f"done by {r}" for r in range(3)]


def fails_at_work(address: RankAddress) -> None:
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    if address.rank == 0:
        comm.close()
        return
    with_heartbeat(comm, lambda: None, name="work")


def test_a_lost_rank_is_not_waited_for(pool: WorkerPool) -> None:
    with pytest.raises(RanksFailedError, match=r"^rank 1: work with rank\(s\) 0"):
        pool.run(fails_at_work, world_size=2)


def test_alone() -> None:
    assert with_heartbeat(Comm(), lambda: 3, name="work") == 3
