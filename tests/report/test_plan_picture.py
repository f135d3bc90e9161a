"""A plan as a picture: everything in its place, whatever the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_cases import UNLIKE, stage
from report_page import Page

from weft.cluster.cluster import Cluster, Node, catalogue
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.report.plan_picture import StageBox, chips_of, picture


def test_stages_of_a_picture_stand_under_the_layers_they_hold() -> None:
    """A lane is covered from end to end, and its cuts are at the same place in every lane."""
    drawn = picture(UNLIKE)
    (first, second), (alone,) = (lane.stages for lane in drawn.lanes)
    edges = [first.x, second.x - first.width - first.x, drawn.width - second.x - second.width]
    assert edges == pytest.approx([1, 2, 1])
    assert (alone.x, alone.width) == (1, drawn.width - 2)
    at = {text: x for x, text in drawn.axis}
    assert at["21"] < second.x < at["22"]
    assert second.lines[1:] == ("16 × npu", "dp 2 tp 8 · ZeRO 0", "ranks 8–23", "fp32")  # noqa: RUF001
    looks = [box.look for box in (first, second, alone)]
    assert looks == ["vendor-0 shade-0", *["vendor-1 shade-0"] * 2]
    assert [lane.share_width / drawn.width for lane in drawn.lanes] == [0.75, 0.25]


def check_stage(box: StageBox, right: float) -> None:
    """A stage is inside the picture, and its text inside the stage."""
    assert box.x >= 0 and box.x + box.width <= right
    for text in box.lines:
        assert box.text_x + 6.5 * len(text) <= box.x + box.width, (text, box.width)


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


def test_a_plan_of_narrow_stages_is_drawn_wider() -> None:
    """So that each says its chip, mesh and ZeRO; up to a limit."""
    stages = tuple(
        stage(range(8 * i, 8 * i + 8), (5 * i, 5 * i + 5), dp=2, tp=4) for i in range(16)
    )
    pipeline = PipelinePlan(stages=stages, samples=4, microbatch=1)
    drawn = picture(Plan(num_layers=80, pipelines=(pipeline,)))
    assert 960 < drawn.width <= 3 * 960
    words = {"8 × cpu dp2 tp4 z0"}  # noqa: RUF001
    assert {" ".join(box.lines[1:3]) for box in drawn.lanes[0].stages} == words


def test_a_few_alike_pipelines_have_a_lane_each() -> None:
    alike = [stage(range(i, i + 1), (0, 2)) for i in range(3)]
    pipelines = tuple(PipelinePlan(stages=(s,), samples=4, microbatch=2) for s in alike)
    headings = [lane.heading for lane in picture(Plan(num_layers=2, pipelines=pipelines)).lanes]
    assert headings == [
        f"Pipeline {i} · 4 of 12 samples a step (33%) · 2 micro-batches of 2" for i in range(3)
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
    assert [box.lines for box in lane.stages] == [
        (f"layers {4 * i}–{4 * i + 3}", "1 × cpu", "dp1 tp1 z0", f"rank {i}", "fp32")  # noqa: RUF001
        for i in range(8)
    ]


def test_colours_go_by_vendor_and_shades_by_kind() -> None:
    """Where the chips are known, and are those of the plan."""
    names = ["H100-SXM5-80GB", "A100-SXM4-80GB", "MI300X", "H100-SXM5-80GB"]
    chips = tuple(catalogue()[name] for name in names)
    node = Node(host="a", cpu="c", cores=1, memory_gib=1.0, cpu_bf16=True, chips=chips)
    cluster = Cluster(nodes=(node,))
    stages = tuple(stage(range(i, i + 1), (8 * i, 8 * i + 8), "cuda") for i in range(4))
    pipeline = PipelinePlan(stages=stages, samples=4, microbatch=1)
    plan = Plan(num_layers=32, pipelines=(pipeline,))
    drawn = picture(plan, chips_of(plan, cluster))
    assert [box.look for box in drawn.lanes[0].stages] == [
        "vendor-0 shade-0",
        "vendor-0 shade-1",
        "vendor-1 shade-0",
        "vendor-0 shade-0",
    ]
    assert [box.lines[1] for box in drawn.lanes[0].stages] == [
        f"1 × {name}"  # noqa: RUF001
        for name in ("NVIDIA H100-SXM5-80GB", "NVIDIA A100-SXM4-80GB", "AMD MI300X")
    ] + ["1 × NVIDIA H100-SXM5-80GB"]  # noqa: RUF001
    words = [item.text for item in Page(str(drawn.legend)).root.all("li")]
    assert words == ["NVIDIA H100-SXM5-80GB", "NVIDIA A100-SXM4-80GB", "AMD MI300X"]
    assert chips_of(plan.each(lambda s: replace(s, device="cpu")), cluster) == {}


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
    assert lane.heading.endswith("2 micro-batches of 2 · schedule zb-v")
    details = [box.tooltip.split("; ")[1] for box in lane.stages]
    assert details[0] == "ranks 0–1 · dp 2 · cpu fp32 · ZeRO 2 · recompute"  # noqa: RUF001
    assert details[1] == "rank 2 · cpu fp32 · 3 passes · compiled"
