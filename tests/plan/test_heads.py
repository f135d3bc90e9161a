"""Parts of the head in a plan: how they are said, kept, shown and refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from plan.test_stages import planned

from weft.config.errors import ConfigError
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.heads import with_head_rows
from weft.planner.validate import validate_plan

ROWS = 100


def divided(*rows: tuple[int, int], **pipeline: object) -> Plan:
    """Four layers on three ranks, and rows of the head on the first and the last."""
    ends = ((0, 2), (2, 4), (4, 4))
    stages = [StagePlan(mesh=Mesh.of((n,), dp=1), layers=held) for n, held in enumerate(ends)]
    parts = [
        replace(stages[n], layers=(4, 4), head_rows=r) for n, r in zip((0, 2), rows, strict=False)
    ]
    made = PipelinePlan(stages=(*stages, *parts), samples=6, microbatch=1, **pipeline)  # type: ignore[arg-type]
    return Plan(num_layers=4, pipelines=(made,))


def check(plan: Plan, rows: int = ROWS) -> None:
    validate_plan(plan, num_layers=4, global_batch=6, head_rows=rows)


def test_a_plan_with_parts_is_read_back_and_says_who_computes_what() -> None:
    plan = divided((0, 30), (30, ROWS))
    check(plan)
    assert Plan.from_json(plan.to_json()) == plan
    (pipeline,) = plan.pipelines
    assert pipeline.positions() == [(0, 3), (1,), (2, 4)]
    assert pipeline.borders == [(0, 1), (1, 2), (2, 3), (2, 4), (3, 4), (4, 3)]
    assert [pipeline.computes(stage, "head") for stage in range(5)] == [False] * 3 + [True] * 2
    assert [pipeline.part_of_head(stage) for stage in range(5)] == [0, 0, 0, 0.3, 0.7]
    small = with_head_rows(plan, 12)
    assert [stage.head_rows for stage in small.pipelines[0].stages[3:]] == [(0, 4), (4, 12)]


def stages(plan: Plan, change: Callable[[tuple[StagePlan, ...]], tuple[StagePlan, ...]]) -> Plan:
    (pipeline,) = plan.pipelines
    return replace(plan, pipelines=(replace(pipeline, stages=change(pipeline.stages)),))


GOOD = divided((0, 30), (30, ROWS))
LAST = GOOD.pipelines[0].stages[-1]
BROKEN = [
    (divided((0, 30), (40, ROWS)), "stages[4].head_rows = [40, 100]: expected a range of at least"),
    (divided((0, 0), (0, ROWS)), "stages[3].head_rows = [0, 0]: expected a range of at least one"),
    (divided((0, 30), (30, 90)), "stages.head_rows = [[0, 30], [30, 90]]: expected all 100 rows"),
    (
        divided((0, ROWS)),
        "stages.head_rows = [[0, 100]]: expected several parts. Without head_rows",
    ),
    (
        stages(GOOD, lambda held: (held[0], held[3], held[1], held[2], held[4])),
        "stages[1].head_rows = [0, 30]: expected null on every stage that another",
    ),
    (
        stages(GOOD, lambda held: (*held[:4], replace(LAST, mesh=held[0].mesh))),
        "stages[4].mesh.ranks = [0]: expected the mesh of a stage without head_rows",
    ),
    (
        stages(GOOD, lambda held: (*held[:4], replace(LAST, passes=2))),
        "stages[4].passes = 2: expected 1 with head_rows",
    ),
    (
        stages(GOOD, lambda held: (*held[:4], replace(LAST, head_rows=(30.0, 100)))),
        "stages[4].head_rows = 30.0: expected a value of type int",
    ),
    (
        divided((0, 30), (30, ROWS), lists=("6F 6B",) * 3),
        "lists = ['6F 6B', '6F 6B', '6F 6B']: expected every action of 6 micro-batches",
    ),
    (
        replace(GOOD, domains=((0, 1), (2,))),
        "stages.head_rows = [[0, 30], [30, 100]]: expected null. Parts of the head are for plans",
    ),
]


@pytest.mark.parametrize(("plan", "words"), BROKEN, ids=[words[:30] for _, words in BROKEN])
def test_what_is_no_whole_head_or_cannot_run_is_refused(plan: Plan, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(plan)
    assert str(refused.value).startswith(f"pipelines[0].{words}")


def test_a_head_that_stays_whole_has_no_parts() -> None:
    with pytest.raises(ConfigError, match="stays whole: it is the embedding's table"):
        check(GOOD, rows=0)


def test_a_configuration_says_weights_of_meshes() -> None:
    asked = {"stages": [{"layers": 2}, {"layers": 2}, {"layers": 0}], "head": [3, 0, 7]}
    plan = planned(**asked, head_rows=ROWS)
    assert [stage.head_rows for _, _, stage in plan.stages()] == [None] * 3 + [(0, 30), (30, 100)]
    for head, words in (
        ([3, 7], "a number for each of 3 meshes"),
        ([0, 3, 0], "two or more above 0"),
        ([1, 0, 1000], "one of 100 rows"),
    ):
        with pytest.raises(ConfigError, match=words):
            planned(**{**asked, "head": head}, head_rows=ROWS)
    with pytest.raises(ConfigError, match="embedding's table"):
        planned(**asked)
