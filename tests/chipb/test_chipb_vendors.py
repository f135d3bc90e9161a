"""Chips that PyTorch calls the same, of two vendors: groups of one talk natively, others do not."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from chipb.chip import NAME, ChipbPlatform, with_chips
from chipb.strict_memory import on_chips
from parity.cases import Case
from parity.test_parity import TOLERANCE
from strict.group import groups_opened
from strict.plans import Strict
from strict.server import Where

from weft.comm.address import RankAddress
from weft.elastic.pool import WorkerPool

FOUR = "green green red red"
CASES = [
    # A border from two ranks to two, tied tables in both, tp inside the first, dp in the second.
    (
        Case("border-tp2-to-dp2", shares=(6,), dp=((1, 2),), tp=((2, 1),), layers=((2, 2),),
             tied=True, zeros=(0, 1)),
        FOUR,
        {(0, 1), (2, 3)},
    ),
    # What two vendors hold in common, sharded: its reduction and gathering.
    (
        Case("zero2-beside", shares=(4, 2), dp=((1,), (1,)), tp=((2,), (2,)), zero=2),
        FOUR,
        {(0, 1), (2, 3)},
    ),
    # Within one pipeline: three positions, there and back.
    (
        Case("there-and-back", shares=(6,), dp=((1, 1, 1),), tp=((2, 1, 1),), layers=((1, 2, 1),)),
        "green green red green",
        {(0, 1)},
    ),
]  # fmt: skip
"""With the vendors of its ranks, and the groups that talk natively."""


def on_chips_of(address: RankAddress, where: Where, vendors: str, job: Any, *args: Any) -> Any:
    """A rank on a chip of its own vendor, whose library joins nobody else's."""
    return on_chips(address, where, _of, vendors.split(), job, *args)


def _of(address: RankAddress, vendors: list[str], job: Any, *args: Any) -> Any:
    build = f"strict 2 of {vendors[address.rank]}"
    with mock.patch.object(ChipbPlatform, "build", return_value=build):
        trace = job(address, *args)
    for ranks in groups_opened():
        assert len({vendors[rank] for rank in ranks}) == 1, f"{ranks} share no library"
    return trace, sorted(groups_opened())


@pytest.mark.parametrize(
    ("case", "vendors", "native"), CASES, ids=lambda value: getattr(value, "name", "")
)
def test_matches_one_process(
    case: Case, vendors: str, native: set[tuple[int, ...]], chips: WorkerPool
) -> None:
    opened: set[tuple[int, ...]] = set()

    class Pool:
        """Takes what ranks say of their groups off what they return."""

        def run(self, on: Any, *args: Any, world_size: int) -> list[Any]:
            if on is with_chips:
                return chips.run(on, *args, world_size=world_size)
            where, *rest = args
            found = chips.run(on, where, vendors, *rest, world_size=world_size)
            opened.update(ranks for _, groups in found for ranks in groups)
            return [trace for trace, _ in found]

    strict = Strict(Pool(), on_chips_of, alone=with_chips, device=NAME)
    found = strict.difference(case, queues=8, seed=0)
    assert found.largest < TOLERANCE, found
    assert opened == native
