"""Stages that a configuration asks for -> a plan: layers, ranks, schedules, and what is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config.batch import Batch
from weft.config.errors import ConfigError
from weft.config.plan_sections import PlanConfig, StageConfig
from weft.config.schema import root
from weft.plan.mesh import Mesh
from weft.plan.plan import Plan, StagePlan
from weft.planner.stages import check_order, pipelines_of, staged_plan
from weft.planner.validate import validate_plan
from weft.platform.registry import PLATFORMS
from weft.precision.registry import PRECISIONS
from weft.recompute.registry import MODES
from weft.schedules.registry import SCHEDULES

BATCH = Batch(samples=24, micro=4, accumulation=6, note="")


def planned(batch: Batch = BATCH, num_layers: int = 4, *, head_rows: int = 0, **plan: Any) -> Plan:
    asked = PlanConfig.model_validate(plan)

    def computes(_: StageConfig, stage: StagePlan) -> StagePlan:
        return stage

    pipelines = pipelines_of(asked, (1,))
    return staged_plan(asked, pipelines, batch, num_layers, computes, head_rows=head_rows)


def layers(plan: Plan) -> list[tuple[int, int]]:
    return [stage.layers for _, _, stage in plan.stages()]


def ranks(plan: Plan) -> list[tuple[int, ...]]:
    return [stage.mesh.ranks for _, _, stage in plan.stages()]


def test_the_words_are_those_of_the_registries() -> None:
    """Config knows none of what it names."""
    assert root().at("plan.schedule").words == ("made", *SCHEDULES)
    assert root().at("compute.precision").words == ("auto", *PRECISIONS)
    assert root().at("compute.device").words == ("auto", *PLATFORMS)
    assert root().at("compute.recompute").words == ("auto", *MODES)


def test_ranks_follow_the_order_of_the_stages() -> None:
    plan = planned(stages=[{"tp": 2}, {"dp": 3}, {}])
    assert ranks(plan) == [(0, 1), (2, 3, 4), (5,)]
    meshes = [stage.mesh for _, _, stage in plan.stages()]
    assert meshes == [Mesh.of((0, 1), tp=2), Mesh.of((2, 3, 4), dp=3), Mesh.of((5,), dp=1)]
    assert layers(plan) == [(0, 2), (2, 3), (3, 4)]
    (pipeline,) = plan.pipelines
    assert (pipeline.samples, pipeline.microbatch, pipeline.schedule) == (24, 4, "1f1b")


def test_the_order_of_the_axes_places_ranks() -> None:
    plan = planned(stages=[{"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "order": ["tp", "dp"]}])
    first, second = (stage.mesh for _, _, stage in plan.stages())
    assert list(first.groups("tp")) == [(0, 1), (2, 3)]
    assert list(second.groups("tp")) == [(4, 6), (5, 7)]


def test_an_order_names_the_axes_of_several_ranks() -> None:
    """A new axis is 1 in configurations that were written before it."""
    sizes = {"cp": 1, "dp": 2, "tp": 3}
    for order in (("tp", "dp"), ("tp", "cp", "dp"), ("dp", "tp", "cp")):
        check_order(order, sizes, "order")
    with pytest.raises(ConfigError) as refused:
        check_order(("cp", "dp"), sizes, "order")
    assert str(refused.value) == (
        "order = ['cp', 'dp']: expected every axis above 1. Not named: tp = 3."
    )


def test_what_is_not_said_is_split_evenly() -> None:
    assert layers(planned(stages=[{}, {"layers": 1}, {}])) == [(0, 2), (2, 3), (3, 4)]
    assert layers(planned(stages=[{"layers": 0}, {}])) == [(0, 0), (0, 4)]


def test_a_stage_may_end_inside_a_layer() -> None:
    assert layers(planned(stages=[{"layers": 1.5}, {}])) == [(0, 1.5), (1.5, 4)]
    assert layers(planned(stages=[{}, {"layers": 0.5}, {}])) == [(0, 2), (2, 2.5), (2.5, 4)]
    v = planned(stages=[{"layers": 2.5}, {}], schedule="zb-v")
    assert layers(v) == [(0, 1), (1, 2), (2, 2.5), (2.5, 4)]
    split = planned(stages=[{"split": [0.5, 1]}, {"split": [1.5, 1]}], schedule="zb-v")
    assert layers(split) == [(0, 0.5), (0.5, 2), (2, 3), (3, 4)]


def test_pipelines_by_hand() -> None:
    """Shares 3:1 of 24 samples; the second cuts its six into micro-batches of four and two."""
    plan = planned(
        Batch(samples=24, micro=6, accumulation=1, note=""),
        pipelines=[
            {
                "share": 3,
                "stages": [{"layers": 3, "tp": 2, "zero": 1}, {"passes": 2}],
                "schedule": "gpipe",
            },
            {"stages": [{"dp": 2}], "micro": 4},
        ],
    )
    assert [(p.samples, p.microbatch) for p in plan.pipelines] == [(18, 6), (6, 4)]
    assert [p.schedule for p in plan.pipelines] == ["gpipe", "1f1b"]
    assert ranks(plan) == [(0, 1), (2,), (3, 4)]
    assert layers(plan) == [(0, 3), (3, 4), (0, 4)]
    assert [(s.zero, s.passes) for _, _, s in plan.stages()] == [(1, 1), (0, 2), (0, 1)]
    assert [len(plan.rank_plan(r).microbatches()) for r in range(5)] == [3, 3, 3, 2, 2]


def test_a_schedule_says_how_many_stages_a_mesh_has() -> None:
    two = [{"layers": 3}, {"layers": 1}]
    plan = planned(stages=two, schedule="zb-v")
    assert (ranks(plan), layers(plan)) == (
        [(0,), (1,), (1,), (0,)],
        [(0, 2), (2, 3), (3, 3), (3, 4)],
    )
    plan = planned(stages=two, schedule="interleaved")
    assert (ranks(plan), layers(plan)) == ([(0,), (1,)] * 2, [(0, 2), (2, 3), (3, 4), (4, 4)])
    plan = planned(stages=[{}, {}], schedule="interleaved", chunks=3, num_layers=6)
    assert layers(plan) == [(n, n + 1) for n in range(6)]
    plan = planned(stages=[{"split": [0, 1]}, {"split": [2, 1]}], schedule="zb-v")
    assert layers(plan) == [(0, 0), (0, 2), (2, 3), (3, 4)]


@given(
    st.sampled_from(tuple(SCHEDULES)),
    st.lists(st.integers(0, 5) | st.none(), min_size=1, max_size=4),
    st.integers(0, 9),
)
def test_every_layout_is_a_valid_plan(schedule: str, counts: list[int | None], spare: int) -> None:
    """What is laid out is where the schedule wants it, and all layers are there once."""
    if None not in counts:
        spare = 0
    num_layers = sum(count or 0 for count in counts) + spare
    more = {"schedule": schedule} if len(counts) > 1 else {}
    plan = planned(num_layers=num_layers, stages=[{"layers": c} for c in counts], **more)
    validate_plan(plan, num_layers=num_layers, global_batch=24)


STAGES = "plan.stages = {layers: [3, 2]}: expected layers that add up to the model's 4."
TWO = [{"layers": 3}, {}]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too many layers": (
        {"stages": [{"layers": 3}, {"layers": 2}]},
        f"{STAGES} They add up to 5; a stage whose layers are null takes what is left.",
    ),
    "too few layers": (
        {"pipelines": [{"stages": [{"layers": 3}]}]},
        "plan.pipelines[0].stages = {layers: [3]}: expected layers that add up to the model's 4. "
        "They add up to 3; a stage whose layers are null takes what is left.",
    ),
    "schedule of one stage": (
        {"stages": [{}], "schedule": "gpipe"},
        "plan.schedule = 'gpipe': expected null where no pipeline of several stages is left to it."
        " Leave it out, or write plan.schedule=null where a recipe has it.",
    ),
    "schedule beside shares": (
        {"shares": [2, 1], "schedule": "gpipe"},
        "plan.schedule = 'gpipe': expected null where no pipeline of several stages is left to it."
        " Leave it out, or write plan.schedule=null where a recipe has it.",
    ),
    "schedule that every pipeline overrules": (
        {"pipelines": [{"stages": TWO, "schedule": "gpipe"}], "schedule": "1f1b"},
        "plan.schedule = '1f1b': expected null where no pipeline of several stages is left to it."
        " Leave it out, or write plan.schedule=null where a recipe has it.",
    ),
    "schedule of one stage among pipelines": (
        {"pipelines": [{"stages": TWO}, {"stages": [{}], "schedule": "zb-v"}]},
        "plan.pipelines[1].schedule = 'zb-v': expected null for a pipeline of one stage. "
        "It is for several stages.",
    ),
    "chunks without interleaving": (
        {"stages": TWO, "chunks": 2},
        'plan.chunks = 2: expected null where no schedule "interleaved" or "made" is left to it.',
    ),
    "chunks of another schedule": (
        {"pipelines": [{"stages": TWO, "schedule": "zb-v", "chunks": 3}]},
        'plan.pipelines[0].chunks = 3: expected null with the schedule "zb-v".',
    ),
    "chunks of one stage": (
        {"pipelines": [{"stages": [{}], "chunks": 3}]},
        "plan.pipelines[0].chunks = 3: expected null for a pipeline of one stage. "
        "It is for several stages.",
    ),
    "one chunk": (
        {"stages": TWO, "schedule": "interleaved", "chunks": 1},
        'plan.chunks = 1: expected at least 2 with the schedule "interleaved". '
        'With one stage on each mesh, "1f1b" is the same.',
    ),
    "split without chunks": (
        {"stages": [{"split": [3]}, {}]},
        "plan.stages[0].split = [3]: expected null. The schedule gives each mesh one stage: use "
        "layers.",
    ),
    "split into another number": (
        {"stages": [{"split": [1, 1, 1]}, {}], "schedule": "zb-v"},
        "plan.stages[0].split = [1, 1, 1]: expected 2 numbers, one for each stage of the mesh.",
    ),
    "split and layers": (
        {"stages": [{"split": [1, 1], "layers": 2}, {}], "schedule": "zb-v"},
        "plan.stages[0].layers = 2: expected null beside split. split adds up.",
    ),
    "order of one axis": (
        {"stages": [{}, {"dp": 2, "order": ["tp", "dp"]}]},
        "plan.stages[1].order = ['tp', 'dp']: expected null where no two axes are above 1. "
        "There is nothing to order.",
    ),
    "order without an axis": (
        {"stages": [{"dp": 2, "tp": 2, "order": ["tp"]}]},
        "plan.stages[0].order = ['tp']: expected every axis above 1. Not named: dp = 2.",
    ),
    "order with an axis twice": (
        {"stages": [{"dp": 2, "tp": 2, "order": ["tp", "dp", "tp"]}]},
        "plan.stages[0].order = ['tp', 'dp', 'tp']: expected every axis once.",
    ),
    "ranks without samples": (
        {"stages": [{}, {"dp": 5}]},
        "plan.stages[1].dp = 5: expected at most the samples of a micro-batch (4). "
        "Further ranks would have nothing to do.",
    ),
    "passes over no samples": (
        {"stages": [{}, {"dp": 3, "passes": 3}]},
        "plan.stages[1].passes = 3: expected at most 2, the samples that a rank has of a "
        "micro-batch.",
    ),
    "recompute of nothing": (
        {"stages": [{}, {"layers": 0, "recompute": "full"}]},
        "plan.stages[1].recompute = 'full': expected null on a stage without layers. "
        "It is for layers alone.",
    ),
    "compile of nothing": (
        {"stages": [{"layers": 0, "compile": True}, {}]},
        "plan.stages[0].compile = true: expected null on a stage without layers. "
        "It is for layers alone.",
    ),
    "pieces of nothing": (
        {"stages": [{}, {"layers": 0, "tp": 2, "pieces": 2}]},
        "plan.stages[1].pieces = 2: expected 1 on a stage without layers. It is for layers alone.",
    ),
    "micro-batch above the share": (
        {"pipelines": [{"stages": [{}], "micro": 25}]},
        "plan.pipelines[0].micro = 25: expected at most the samples it takes (24).",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    plan, message = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        planned(**plan)
    assert str(refused.value) == message
