"""A plan as a picture: everything in its place, whatever the plan."""

from __future__ import annotations

import pytest
from report_cases import UNLIKE, stage

from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.report.plan_picture import StageBox, picture


def test_stages_of_a_picture_stand_under_the_layers_they_hold() -> None:
    """A lane is covered from end to end, and its cuts are at the same place in every lane."""
    drawn = picture(UNLIKE)
    (first, second), (alone,) = (lane.stages for lane in drawn.lanes)
    edges = [first.x, second.x - first.width - first.x, drawn.width - second.x - second.width]
    assert edges == pytest.approx([1, 2, 1])
    assert (alone.x, alone.width) == (1, drawn.width - 2)
    at = {text: x for x, text in drawn.axis}
    assert at["21"] < second.x < at["22"]
    assert [cell.text for cell in second.cells] == [str(rank) for rank in range(8, 24)]
    assert (first.kind, second.kind, alone.kind) == (0, 1, 1)
    assert [lane.share_width / drawn.width for lane in drawn.lanes] == [0.75, 0.25]


def check_stage(box: StageBox, right: float) -> None:
    """A stage is inside the picture; its text and its ranks are inside the stage."""
    assert box.x >= 0 and box.x + box.width <= right
    for text in (box.heading, box.detail):
        assert box.text_x + 6.5 * len(text) <= box.x + box.width, (text, box.width)
    for cell in box.cells:
        assert box.x <= cell.x and cell.x + cell.width <= box.x + box.width
        assert box.y <= cell.y and cell.y + 18 <= box.y + box.height


def check(plan: Plan) -> None:
    """Everything is where it can be seen, and lanes do not overlap."""
    drawn = picture(plan)
    bottom = 0.0
    for lane in drawn.lanes:
        assert lane.y >= bottom
        bottom = max(box.y + box.height for box in lane.stages)
        for box in lane.stages:
            check_stage(box, drawn.width)
    assert bottom <= drawn.height


@pytest.mark.parametrize("num_stages", [1, 3, 16, 126])
def test_picture_of_a_deep_plan(num_stages: int) -> None:
    cuts = [126 * i // num_stages for i in range(num_stages + 1)]
    stages = tuple(
        stage(range(8 * i, 8 * i + 8), (cuts[i], cuts[i + 1]), tp=8) for i in range(num_stages)
    )
    pipeline = PipelinePlan(stages=stages, samples=64, microbatch=1)
    check(Plan(num_layers=126, pipelines=(pipeline,)))


def test_a_few_alike_pipelines_have_a_lane_each() -> None:
    alike = [stage(range(i, i + 1), (0, 2)) for i in range(3)]
    pipelines = tuple(PipelinePlan(stages=(s,), samples=4, microbatch=2) for s in alike)
    headings = [lane.heading for lane in picture(Plan(num_layers=2, pipelines=pipelines)).lanes]
    assert headings == [
        f"Pipeline {i} · 4 of 12 samples a step (33%) · 2 microbatches of 2" for i in range(3)
    ]


def test_stages_without_layers_and_pipelines_without_samples_can_be_drawn() -> None:
    stages = (stage(range(1), (0, 0)), stage(range(1, 2), (0, 4)), stage(range(2, 3), (4, 4)))
    idle = PipelinePlan(stages=(stage(range(3, 4), (0, 4)),), samples=0, microbatch=1)
    pipeline = PipelinePlan(stages=stages, samples=4, microbatch=1)
    plan = Plan(num_layers=4, pipelines=(pipeline, idle))
    check(plan)
    tooltips = [box.tooltip.split(";")[0] for box in picture(plan).lanes[0].stages]
    assert tooltips == ["stage 0: embedding", "stage 1: layers 0–3", "stage 2: head"]  # noqa: RUF001


def test_stages_of_a_lane_say_the_same_kind_of_thing() -> None:
    """The outer two have room for more than the inner ones."""
    stages = tuple(stage(range(i, i + 1), (4 * i, 4 * i + 4)) for i in range(8))
    pipeline = PipelinePlan(stages=stages, samples=4, microbatch=1)
    (lane,) = picture(Plan(num_layers=32, pipelines=(pipeline,))).lanes
    assert [box.heading for box in lane.stages] == [f"{4 * i}–{4 * i + 3}" for i in range(8)]  # noqa: RUF001
    assert [box.detail for box in lane.stages] == [f"rank {i}" for i in range(8)]


def test_picture_of_many_alike_pipelines_folds_them() -> None:
    alike = tuple(
        PipelinePlan(stages=(stage(range(i, i + 1), (0, 2)),), samples=3, microbatch=1)
        for i in range(0, 400, 2)
    )
    other = PipelinePlan(stages=(stage(range(401, 402), (0, 2)),), samples=600, microbatch=1)
    plan = Plan(num_layers=2, pipelines=(*alike, other))
    check(plan)
    drawn = picture(plan)
    assert [lane.share_width / drawn.width for lane in drawn.lanes] == [0.5, 0.5]
    assert drawn.lanes[0].heading.startswith("Pipelines 0–199, all equal · 600 of 1,200")  # noqa: RUF001


def test_a_picture_says_the_schedule_and_the_settings_of_stages() -> None:
    first = StagePlan(mesh=Mesh.of(range(2), dp=2), layers=(0, 4), zero=2, recompute="full")
    second = StagePlan(mesh=Mesh.of((2,), dp=1), layers=(4, 8), passes=3, compile=True)
    pipeline = PipelinePlan(stages=(first, second), samples=4, microbatch=2, schedule="zb-v")
    (lane,) = picture(Plan(num_layers=8, pipelines=(pipeline,))).lanes
    assert lane.heading.endswith("2 microbatches of 2 · schedule zb-v")
    details = [box.tooltip.split("; ")[1] for box in lane.stages]
    assert details[0] == "ranks 0–1 · dp 2 · cpu fp32 · ZeRO 2 · recompute"  # noqa: RUF001
    assert details[1] == "rank 2 · cpu fp32 · 3 passes · compiled"
