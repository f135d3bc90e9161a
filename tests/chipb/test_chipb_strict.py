"""Chips that talk through the strict library: streams, queues and numbers at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from chipb.chip import NAME, with_chips
from chipb.strict_memory import on_chips
from chipb.test_chipb_jobs import on
from parity.test_parity import TOLERANCE
from strict.faults import PLAIN, without_wait
from strict.plans import CASES, Strict
from strict.server import Where

from weft.comm.address import RankAddress
from weft.elastic.failure import RanksFailedError
from weft.elastic.pool import WorkerPool

SOME = [
    ("pp2-gpipe", 8, 0),
    ("1f1b-unequal", 1, 1),
    ("pp2-interleaved", 2, 2),
    ("zb-h1-unequal", 4, 3),
    ("pp2-zb-v-tied", 1, 4),
    ("dualpipe-v-zero2", 2, 5),
    ("zero3-tied-recompute", 1, 6),
    ("domains-zero0-2-1", 1, 7),
    ("domains-zero3-pipelines", 4, 8),
    ("domains-three-unlike", 8, 9),
    ("by-work-cp2-gpt2-dropout", 2, 10),
]
"""With a number of hardware queues, and a seed."""


@pytest.fixture(scope="module")
def strict(chips: WorkerPool) -> Strict:
    return Strict(chips, on_chips, alone=with_chips, device=NAME)


@pytest.mark.parametrize(("name", "queues", "seed"), SOME)
def test_matches_one_process(name: str, queues: int, seed: int, strict: Strict) -> None:
    found = strict.difference(CASES[name], queues=queues, seed=seed)
    assert found.largest < TOLERANCE, found


@pytest.mark.parametrize(
    ("name", "families"),
    [("domains-zero0-2-1", f"{NAME} | cpu"), ("domains-zero3-pipelines", f"{NAME} {NAME} | cpu")],
)
def test_the_library_of_a_family_is_used_inside_its_domain(
    name: str, families: str, chips: WorkerPool
) -> None:
    """Chips beside a processor: their own library inside, host memory between, the same numbers."""
    beside = partial(on, families=families)
    apart = Strict(chips, on_chips, alone=with_chips, device=NAME, beside=beside)
    found = apart.difference(CASES[name], queues=2, seed=3)
    assert found.largest < TOLERANCE, found


def on_hasty_chips(address: RankAddress, where: Where, *job: Any) -> Any:
    with without_wait(address.rank):
        return on_chips(address, where, *job)


def test_a_stream_that_does_not_wait_for_what_was_received(chips: WorkerPool) -> None:
    hasty = Strict(chips, on_hasty_chips, alone=with_chips, device=NAME)
    with pytest.raises(RanksFailedError) as caught:
        hasty.difference(PLAIN, queues=8, seed=0)
    words = "\n".join(failure.message for failure in caught.value.failures)
    assert "on stream 0 reads what receive of 1024 float64 from rank 0 at weft/" in words
    assert "no event makes it wait (at weft/" in words
