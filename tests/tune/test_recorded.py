"""Trials that were measured once in a lab of two unlike nodes of two hosts (2026-11-26, ``python -m
benchmarks.tuner examples/clusters/mix-2x0.6-2x0.3.yaml``), played: how near the tuner comes."""

from typing import NamedTuple

import pytest
from tune.tune_cases import candidate, play

from weft.tune.candidate import Candidate
from weft.tune.job import GUESSED
from weft.tune.tuner import Tuner

THINGS = (
    *("computing on big", "computing on small", "messages inside nodes"),
    *("messages between nodes", "calls of micro-batches"),
)


class Played(NamedTuple):
    """A plan, its forecast, and what a step took."""

    predicted_s: float
    step_s: float
    within: float
    leans: tuple[float, ...]
    """On ``THINGS``."""
    has: tuple[str, ...]


BESIDE, HALVES = "pipelines side by side", "backward in halves"
DP, TP = "meshes along dp", "meshes along tp"
NO_PROFILE = (
    Played(0.2458, 0.364, 0.26, (0.88, 0.91, 0.01, 0.05, 0.03), (BESIDE, "ZeRO", DP)),
    Played(0.2476, 0.651, 0.16, (0.81, 0.88, 0.02, 0.05, 0.02), (BESIDE, "ZeRO", TP)),
    Played(0.2489, 0.653, 0.0, (0.87, 0.75, 0.0, 0.1, 0.02), (BESIDE, "ZeRO", DP, TP)),
    Played(0.2518, 1.176, 0.3, (0.87, 0.87, 0.0, 0.1, 0.03), (BESIDE, "ZeRO", DP, TP)),
    Played(0.2528, 0.814, 0.2, (0.87, 0.58, 0.04, 0.04, 0.03), (BESIDE, "ZeRO", TP)),
    Played(0.2535, 1.045, 0.14, (0.69, 0.87, 0.02, 0.05, 0.03), (BESIDE, "ZeRO", TP)),
    Played(0.254, 0.257, 0.09, (0.85, 0.63, 0.0, 0.12, 0.02), (BESIDE, "ZeRO", DP)),
)
PROFILED = (
    Played(0.1238, 0.268, 0.25, (0.84, 0.19, 0.03, 0.02, 0.1), (HALVES, "a cut", "ZeRO", DP)),
    Played(0.1322, 0.262, 0.12, (0.77, 0.08, 0.03, 0.04, 0.09), (HALVES, "ZeRO", DP)),
    Played(0.1338, 0.394, 0.0, (0.76, 0.22, 0.04, 0.04, 0.09), (HALVES, "ZeRO", DP, TP)),
    Played(0.1367, 0.249, 0.09, (0.66, 0.17, 0.03, 0.08, 0.09), (HALVES, "ZeRO", DP)),
    Played(0.1399, 0.355, 0.22, (0.65, 0.17, 0.05, 0.08, 0.09), (HALVES, "ZeRO", DP, TP)),
    Played(0.1417, 0.248, 0.13, (0.89, 0.0, 0.03, 0.02, 0.08), (HALVES, "ZeRO", DP)),
    Played(0.1498, 0.324, 0.23, (0.81, 0.04, 0.02, 0.01, 0.08), (HALVES, "ZeRO", DP)),
)
NEAR = 1.02


def as_candidate(number: int, plan: Played) -> Candidate:
    leans = dict(zip(THINGS, plan.leans, strict=True)) | dict.fromkeys(plan.has, 1.0)
    return candidate(number, plan.predicted_s, leans=leans)


@pytest.mark.parametrize(
    ("plans", "times"),
    [
        pytest.param(NO_PROFILE, GUESSED, id="no profile"),
        pytest.param(PROFILED, 1.097, id="a profile that is off by twice"),
    ],
)
def test_it_does_not_end_before_a_plan_near_the_best_was_tried(
    plans: tuple[Played, ...], times: float
) -> None:
    """However sure of itself the forecast was; where tensor parallelism takes four times as long as
    predicted, without trying every plan that has it."""
    tuner = Tuner([as_candidate(n, p) for n, p in enumerate(plans)], times=times, steps=100_000)
    while (number := tuner.next().candidate) is not None:
        play(tuner, number, plans[number].step_s, plans[number].within)
    assert tuner.best_s <= NEAR * min(plan.step_s for plan in plans)
    assert len(tuner.outcomes) < len(plans)
