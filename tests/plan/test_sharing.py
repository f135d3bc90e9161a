"""ZeRO without anything to divide is refused; with something, never."""

from dataclasses import replace

import pytest

from weft.config.errors import ConfigError
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan, ZeroLevel
from weft.planner.validate import refuse_idle_zero


def staged(*stages: tuple[int, int, ZeroLevel], first: int = 0) -> PipelinePlan:
    """(ranks, layers, level) of each stage."""
    built, layer = [], 0
    for ranks, layers, zero in stages:
        mesh = Mesh.of(range(first, first + ranks), dp=ranks)
        built.append(StagePlan(mesh=mesh, layers=(layer, layer + layers), zero=zero))
        first, layer = first + ranks, layer + layers
    return PipelinePlan(stages=tuple(built), samples=8, microbatch=4)


def plan(*pipelines: PipelinePlan) -> Plan:
    return Plan(num_layers=4, pipelines=pipelines)


def v_shaped() -> Plan:
    """Two meshes of one rank; the second's last stage is empty."""
    first, second = staged((1, 2, 1), (1, 2, 1)).stages
    empty, last = replace(second, layers=(4, 4)), replace(first, layers=(4, 4))
    return plan(replace(staged((1, 4, 0)), stages=(first, second, empty, last), schedule="zb-v"))


WORKS = {
    "within a stage": (plan(staged((2, 4, 1))), False),
    "beside a stage without": (plan(staged((2, 2, 3), (1, 2, 0))), False),
    "across pipelines": (plan(staged((1, 4, 1)), staged((1, 4, 1), first=1)), False),
    "some layers across pipelines": (
        plan(staged((1, 4, 2)), staged((1, 1, 0), (1, 3, 2), first=1)),
        False,
    ),
    "tied ends": (plan(staged((1, 2, 1), (1, 2, 1))), True),
}


@pytest.mark.parametrize("name", WORKS)
def test_accepted(name: str) -> None:
    given, tied = WORKS[name]
    refuse_idle_zero(given, tied=tied)


def test_a_mesh_with_an_empty_stage_still_shares() -> None:
    (pipeline,) = v_shaped().pipelines
    other = staged((1, 4, 1), first=2)
    refuse_idle_zero(plan(pipeline, other), tied=False)


ALONE = "No other rank holds the parameters of this stage."
LOWEST = "Parameters are kept at the lowest level of the stages that hold them."
REFUSED = {
    "alone": (
        plan(staged((1, 2, 0), (1, 2, 1))),
        False,
        f"pipelines[0].stages[1].zero = 1: expected 0. {ALONE}",
    ),
    "middle of tied ends": (
        plan(staged((1, 1, 0), (1, 2, 2), (1, 1, 0))),
        True,
        f"pipelines[0].stages[1].zero = 2: expected 0. {ALONE}",
    ),
    "both tied ends on one rank": (
        v_shaped(),
        True,
        f"pipelines[0].stages[0].zero = 1: expected 0. {ALONE}",
    ),
    "above the other pipeline": (
        plan(staged((1, 4, 1)), staged((1, 4, 2), first=1)),
        False,
        "pipelines[1].stages[0].zero = 2: expected at most 1, the level of the other pipelines' "
        f"stages for these layers. {LOWEST}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    given, tied, message = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        refuse_idle_zero(given, tied=tied)
    assert str(refused.value) == message
