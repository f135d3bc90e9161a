"""Plans of the parity table on the strict backend; ``python -m benchmarks.strict`` has them all."""

import pytest
from parity.test_parity import TOLERANCE
from strict.plans import CASES, Strict

from weft.elastic.pool import WorkerPool

SOME = [
    ("pp3-uneven", 1, 0),
    ("unlike-stages", 1, 1),
    ("interleaved-unequal", 2, 2),
    ("zb-v-unequal", 1, 3),
    ("dualpipe-v-unequal", 4, 4),
    ("tp2-dp1-to-dp3", 2, 5),
    ("pp2-zb-h1-zero3-uneven", 1, 6),
    ("fp8-gpt2-tp2-zero3", 8, 7),
    ("gpipe-zero3", 1, 8),
    ("domains-zero3-uneven", 1, 9),
    ("domains-three-unlike", 2, 10),
    ("domains-unlike-pipelines-tp", 1, 11),
    ("pieces3-tp3-uneven", 1, 12),
    ("head-three-parts-in-flight", 1, 13),
]
"""With a number of hardware queues, and a seed."""


@pytest.fixture(scope="module")
def strict(pool: WorkerPool) -> Strict:
    return Strict(pool)


@pytest.mark.parametrize(("name", "queues", "seed"), SOME)
def test_matches_one_process(name: str, queues: int, seed: int, strict: Strict) -> None:
    found = strict.difference(CASES[name], queues=queues, seed=seed)
    assert found.largest < TOLERANCE, found
