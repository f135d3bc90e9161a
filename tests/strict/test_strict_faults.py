"""Plans that end well fail once a call is wrong, and both places are named."""

from __future__ import annotations

from typing import Any

import pytest
from strict.faults import PLAIN, RAGGED, Fault, swapped, too_early
from strict.group import on_processors
from strict.plans import Strict
from strict.server import Where

from weft.comm.address import RankAddress
from weft.elastic.failure import RanksFailedError
from weft.elastic.pool import WorkerPool


def on_early(address: RankAddress, where: Where, *job: Any) -> Any:
    return with_fault(too_early, address, where, *job)


def on_swapped(address: RankAddress, where: Where, *job: Any) -> Any:
    return with_fault(swapped, address, where, *job)


def with_fault(fault: Fault, address: RankAddress, where: Where, *job: Any) -> Any:
    with fault(address.rank):
        return on_processors(address, where, *job)


def said(error: RanksFailedError) -> str:
    return "\n".join(failure.message for failure in error.failures)


def test_a_receive_that_is_posted_too_early(pool: WorkerPool) -> None:
    with pytest.raises(RanksFailedError) as caught:
        Strict(pool, on_early).difference(PLAIN, queues=1, seed=0)
    words = said(caught.value)
    assert "deadlock: " in words
    for rank in (0, 1):
        assert f"rank {rank}: " in words
    assert ", in hardware queue 0 behind " in words
    for name in ("expect", "send"):
        assert f" {name} < weft/parallel/pipeline/executor.py:" in words


def test_two_sends_that_are_swapped_on_one_rank(pool: WorkerPool) -> None:
    with pytest.raises(RanksFailedError) as caught:
        Strict(pool, on_swapped).difference(RAGGED, queues=8, seed=0)
    words = said(caught.value)
    assert "mismatch: rank" in words
    assert "receive of 2048 float64 from rank 0 at weft/parallel/pipeline/stage_border.py" in words
    assert "send of 1024 float64 to rank 1 at weft/parallel/pipeline/stage_border.py" in words
