"""Ranks agree before they join: rank 0 decides, from what all know, for all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from weft.comm.address import RankAddress
from weft.comm.agreement import agree
from weft.comm.rendezvous import Rendezvous
from weft.config.errors import ConfigError
from weft.elastic.pool import WorkerPool

TIMEOUT_S = 600.0


def joined(everyone: Sequence[str]) -> str:
    return " ".join(everyone)


def refusing(everyone: Sequence[str]) -> str:
    raise ConfigError("plan.auto", list(everyone), "something else")


def ask(address: RankAddress) -> str:
    with Rendezvous(address, TIMEOUT_S) as rendezvous:
        return agree(rendezvous, f"rank{address.rank}", joined)


def ask_in_vain(address: RankAddress) -> str:
    with Rendezvous(address, TIMEOUT_S) as rendezvous:
        try:
            return agree(rendezvous, address.rank, refusing)
        except ConfigError as error:
            return str(error)


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_hear_what_rank_0_makes_of_what_all_know(pool: WorkerPool, world_size: int) -> None:
    heard = pool.run(ask, world_size=world_size)
    assert heard == [" ".join(f"rank{rank}" for rank in range(world_size))] * world_size


def test_a_refusal_is_heard_by_all(pool: WorkerPool) -> None:
    first, *others = pool.run(ask_in_vain, world_size=3)
    assert first == "plan.auto = [0, 1, 2]: expected something else."
    assert others == [f"rank 0 refused: {first}"] * 2
