"""Whoever adds a schedule, an axis, a setting or a family has to add it to the parity table."""

from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from typing import get_args

from parity import cases
from parity.cases import EVERY, PARITY, Case
from strict.plans import CASES

from weft.config.axes import NAMES
from weft.models.registry import FAMILIES
from weft.plan.plan import PipelinePlan, Plan, StagePlan, ZeroLevel
from weft.schedules.registry import SCHEDULES

PLANS = [case.plan() for case in PARITY]
STAGES = [stage for plan in PLANS for _, _, stage in plan.stages()]
ELSEWHERE = {
    "mesh": "checked by axis below",
    "device": "tests/parity/test_mixed_families.py and, where there is one, a GPU",
    "precision": "fp64, and rows with products in eight bits; tests/train/test_build.py has others",
    "border": "tests/parallel/test_casts.py: what is cast is rounded",
    "expert_cast": "tests/parallel/test_expert_exchange.py: what is cast is rounded",
    "expert_cast_between": "the same, with groups of ranks far apart",
    "reduction": "tests/parallel/test_between_domains.py: what is cast is rounded",
    "gather": "rows with products in eight bits; tests/parallel/test_gathered_weights.py, by bits",
    "state_tier": "tests/tiers/test_state_elsewhere.py, bit for bit",
    "param_tier": "test_chipb_params.py, and memory/test_disk_on_processors.py: bit for bit",
    "compile": "tests/train/test_build.py: compiling takes minutes, and rounds differently",
}


def test_every_axis_occurs_alone_and_with_every_other() -> None:
    ways = (*NAMES, "pp", "pipelines")
    found = {frozenset(_divided(plan)) for plan in PLANS}
    for a, b in product(ways, ways):
        assert any({a, b} <= group for group in found), f"{a} with {b}"
        assert frozenset({a}) in found, f"{a} alone"
    assert any({"dp", "tp", "pp"} <= group for group in found)


def test_every_schedule_occurs_with_every_zero_level_and_with_unequal_layers() -> None:
    found = {
        (pipeline.schedule, stage.zero)
        for plan in PLANS
        for pipeline in plan.pipelines
        for stage in pipeline.stages
    }
    assert found >= set(product(SCHEDULES, get_args(ZeroLevel)))
    unequal = {p.schedule for plan in PLANS for p in plan.pipelines if _is_unequal(p)}
    assert unequal == set(SCHEDULES)


def test_every_setting_of_a_stage_occurs_with_more_than_one_value() -> None:
    for field in fields(StagePlan):
        values = {getattr(stage, field.name) for stage in STAGES}
        assert (len(values) > 1) == (field.name not in ELSEWHERE) or field.name == "mesh", field


def test_every_row_is_compared_and_runs_on_the_strict_backend() -> None:
    tables = [each for each in vars(cases).values() if isinstance(each, list)]
    rows = {case for table in tables for case in table if isinstance(case, Case)}
    names = [case.name for case in EVERY]
    assert rows == set(EVERY)
    assert len(set(names)) == len(names)
    several = {case.name for case in rows if case.plan().world_size > 1}
    assert set(CASES) == several


def test_every_family_occurs() -> None:
    assert {case.family for case in PARITY} == set(FAMILIES)


def test_every_way_to_divide_samples_occurs_with_everything_else() -> None:
    """Full attention has rows of its own, and each way more ranks in the tests of attention."""
    beside = ("alone", "tp", "pp", "pipelines", "border", "zero 1", "zero 2", "zero 3")
    ways = ("ring", "rows", "heads", "heads and keys")
    found = {each for plan in PLANS for each in _samples_divided(plan)}
    assert found >= set(product(ways, beside))
    sizes = {
        (_way(stage), stage.mesh.size("cp"))
        for plan in PLANS
        for _, _, stage in plan.stages()
        if stage.mesh.size("cp") > 1
    }
    assert sizes == {*product(ways[:-1], (2, 4, 8)), *product(ways[-1:], (4, 8))}


def _samples_divided(plan: Plan) -> Iterator[tuple[str, str]]:
    """By way, what else a plan does with the same stage."""
    others = {*_divided(plan)} & {"pp", "pipelines"}
    for number, _, stage in plan.stages():
        ranks, zero = stage.mesh.size("cp"), stage.zero
        if ranks == 1:
            continue
        way = _way(stage)
        more = {f"zero {zero}"} if zero else set()
        more |= {"tp"} if stage.mesh.size("tp") > 1 else set()
        sizes = {each.mesh.size("cp") for each in plan.pipelines[number].stages}
        more |= {"border"} if len(sizes) > 1 else set()
        plain = stage.mesh.size("dp") == 1 == len(plan.pipelines[number].positions())
        yield from ((way, each) for each in more | others or ({"alone"} if plain else set()))


def _way(stage: StagePlan) -> str:
    """How ranks that divide samples attend to one another's tokens."""
    if stage.head_ways == 1:
        return "rows" if stage.scores == "rows" else "ring"
    return "heads" if stage.head_ways == stage.mesh.size("cp") else "heads and keys"


def _divided(plan: Plan) -> Iterator[str]:
    """The ways in which a plan divides the work."""
    for name in NAMES:
        if any(stage.mesh.size(name) > 1 for _, _, stage in plan.stages()):
            yield name
    if any(len(pipeline.positions()) > 1 for pipeline in plan.pipelines):
        yield "pp"
    if len(plan.pipelines) > 1:
        yield "pipelines"


def _is_unequal(pipeline: PipelinePlan) -> bool:
    return len({stage.layers[1] - stage.layers[0] for stage in pipeline.stages}) > 1
