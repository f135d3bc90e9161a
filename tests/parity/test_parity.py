"""Every way of splitting gives the one-process numbers: fp64, random weights, two steps."""

from dataclasses import replace

import pytest
from parity.cases import EVERY, PARITY, STEPS, Case

from weft.diagnose.verdict import TOLERANCE as BY_DTYPE
from weft.diagnose.verify import Rehearsal, Trace, difference, one_process, rehearse
from weft.elastic.pool import WorkerPool

TOLERANCE = 1e-10
"""fp64 rounding is 1e-16; sums over a few thousand terms and Adam's division leave 1e-12."""


@pytest.fixture(scope="session")
def alone(pool: WorkerPool) -> dict[tuple[Rehearsal, int, str], Trace]:
    """Traces of one process, filled on demand."""
    return {}


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_matches_one_process(
    case: Case, pool: WorkerPool, alone: dict[tuple[Rehearsal, int, str], Trace]
) -> None:
    case = case.shallow()
    rehearsal, plan = replace(case.rehearsal(), steps=STEPS), case.plan()
    key = (rehearsal, plan.global_batch, case.precision)
    if key not in alone:
        alone[key] = rehearse(pool.run, one_process(plan), rehearsal)
    reference = alone[key]
    assert len(set(reference.losses)) == rehearsal.steps, "the losses never changed"
    found = rehearse(pool.run, plan, replace(rehearsal, by_work=case.by_work))
    result = difference(reference, found)
    assert result.largest < TOLERANCE, result
    assert found.added == reference.added, "tokens by expert"


def test_domains_in_fp32(pool: WorkerPool) -> None:
    """Sums in the order of domains, not of ranks: within what rounding of fp32 explains."""
    case = next(case for case in PARITY if case.name == "domains-three-unlike")
    plan = case.plan().each(lambda stage: replace(stage, precision="fp32"))
    traces = [rehearse(pool.run, each, case.rehearsal()) for each in (one_process(plan), plan)]
    result = difference(*traces)
    assert 0 < result.largest < BY_DTYPE["float32"], result
