"""Meshes, plans, rank plans and what is refused."""

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config.errors import ConfigError
from weft.plan.mesh import AXES, Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.plan.plan_file import PlanFile
from weft.planner.validate import validate_plan


def data_parallel(shares: list[int], *, microbatch: int = 2, dp: int = 1, layers: int = 4) -> Plan:
    """One single-stage pipeline of ``dp`` ranks for each share."""
    pipelines = []
    for number, samples in enumerate(shares):
        mesh = Mesh.of(range(number * dp, number * dp + dp), dp=dp)
        stage = StagePlan(mesh=mesh, layers=(0, layers))
        pipelines.append(PipelinePlan(stages=(stage,), samples=samples, microbatch=microbatch))
    return Plan(num_layers=layers, pipelines=tuple(pipelines))


def keeping(plan: Plan, *shares: tuple[int, ...]) -> Plan:
    """With ZeRO 1, and what each pipeline's ranks keep of the state."""
    pipelines = []
    for pipeline, weights in zip(plan.pipelines, shares, strict=True):
        stages = (replace(each, zero=1, state_shares=weights) for each in pipeline.stages)
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(plan, pipelines=tuple(pipelines))


@pytest.mark.parametrize("order", list(permutations(AXES[:3])))
def test_coordinates_and_ranks_are_a_bijection_in_every_order(order: tuple[str, ...]) -> None:
    sizes = dict.fromkeys(AXES, 1) | dict(zip(AXES, (2, 3, 4), strict=False))
    mesh = Mesh(tuple(range(10, 34)), tuple((axis, sizes[axis]) for axis in order))
    seen = set()
    for rank in mesh.ranks:
        coordinate = mesh.coordinate(rank)
        assert mesh.rank_at(**coordinate) == rank
        seen.add(tuple(coordinate.items()))
    assert len(seen) == 24
    for axis in AXES:
        groups = list(mesh.groups(axis))
        assert sorted(rank for group in groups for rank in group) == list(mesh.ranks)
        assert all(len(group) == sizes[axis] for group in groups)


@pytest.mark.parametrize("axes", [(("dp", -2), ("tp", -2)), (("dp", 5),), (("lanes", 4),)])
def test_a_mesh_that_is_none_is_refused(axes: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(AssertionError):
        Mesh(tuple(range(4)), axes)


def test_groups_by_hand() -> None:
    mesh = Mesh.of(range(4), dp=2, tp=2)
    assert list(mesh.groups("tp")) == [(0, 1), (2, 3)]
    assert list(mesh.groups("dp")) == [(0, 2), (1, 3)]
    assert list(mesh.groups("cp")) == [(0,), (1,), (2,), (3,)]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_every_sample_is_computed_once(shares: list[int], microbatch: int, dp: int) -> None:
    plan = data_parallel(shares, microbatch=microbatch, dp=dp)
    positions = [
        position
        for rank in range(plan.world_size)
        for part in plan.rank_plan(rank).microbatches()
        for position in part
    ]
    assert sorted(positions) == list(range(plan.global_batch))


def test_unequal_shares_by_hand() -> None:
    plan = data_parallel([4, 2])
    assert plan.rank_plan(0).microbatches() == [range(2), range(2, 4)]
    assert plan.rank_plan(1).microbatches() == [range(4, 6)]


def test_json_round_trip() -> None:
    plan = data_parallel([3, 5], dp=2)
    assert Plan.from_json(plan.to_json()) == plan


def test_json_says_nothing_of_one_piece() -> None:
    plan = data_parallel([3, 5], dp=2)
    assert "pieces" not in plan.to_json()
    cut = plan.each(lambda stage: replace(stage, pieces=2))
    assert Plan.from_json(cut.to_json()) == PlanFile.read(cut.to_json()).plan == cut


REFUSED = {
    "overlap": ("every rank in one mesh only", lambda p: replace(p, pipelines=p.pipelines * 2)),
    "gap": (
        "Missing: [0]",
        lambda p: replace(p, pipelines=(moved(p.pipelines[0], ranks=(1,)),)),
    ),
    "layers left out": (
        "all 4 layers, each once",
        lambda p: replace(p, pipelines=(moved(p.pipelines[0], layers=(0, 3)),)),
    ),
    "starts late": (
        "a range that starts at layer 0",
        lambda p: replace(p, pipelines=(moved(p.pipelines[0], layers=(1, 4)),)),
    ),
    "shares": (
        "shares that add up to batch.samples (6). They add up to 5",
        lambda p: replace(p, pipelines=(replace(p.pipelines[0], samples=5),)),
    ),
    "no microbatch": (
        "0 samples or more, and at least 1 in a microbatch",
        lambda p: replace(p, pipelines=(replace(p.pipelines[0], microbatch=0),)),
    ),
    "nothing to do": (
        "pipelines[1].stages[0].zero = 0: expected 1 or 2. It takes no samples, so all it could do "
        "is keep and update a part of the state.",
        lambda p: data_parallel([6, 0]),
    ),
    "nothing to keep": (
        "pipelines[1].stages[0].state_shares = [0]: expected a weight above 0 for some of its "
        "ranks",
        lambda p: keeping(data_parallel([6, 0]), (1,), (0,)),
    ),
    "empty": ("at least one pipeline", lambda p: replace(p, pipelines=())),
    "no stages": (
        "at least one stage",
        lambda p: replace(p, pipelines=(*p.pipelines, replace(p.pipelines[0], stages=()))),
    ),
    "ranks without samples": (
        "pipelines[0].stages[0].mesh.dp = 3: expected at most the samples of a micro-batch (2). "
        "Further ranks would have nothing to do.",
        lambda p: data_parallel([6], dp=3),
    ),
    "passes over no samples": (
        "pipelines[0].stages[0].passes = 3: expected at most 2, the samples that a rank has of a "
        "micro-batch.",
        lambda p: replace(p, pipelines=(moved(p.pipelines[0], passes=3),)),
    ),
    "no passes": (
        "passes = 0: expected at least 1.",
        lambda p: replace(p, pipelines=(moved(p.pipelines[0], passes=0),)),
    ),
    "no pieces": (
        "pieces = 0: expected at least 1.",
        lambda p: replace(p, pipelines=(moved(p.pipelines[0], pieces=0),)),
    ),
    "pieces of nothing": (
        "pipelines[0].stages[0].pieces = 2: expected 1 where tp is 1. "
        "Pieces are of what its ranks gather and sum inside layers.",
        lambda p: replace(p, pipelines=(moved(p.pipelines[0], pieces=2),)),
    ),
    "heads by too many": (
        "pipelines[0].stages[0].head_ways = 2: expected a divisor of cp (1).",
        lambda p: replace(p, pipelines=(moved(p.pipelines[0], head_ways=2),)),
    ),
    "experts by too many": (
        "pipelines[0].stages[0].expert_ways = 2: expected a divisor of ep (1).",
        lambda p: replace(p, pipelines=(moved(p.pipelines[0], expert_ways=2),)),
    ),
    "pieces of tokens that stay": (
        "pipelines[0].stages[0].expert_pieces = 2: expected 1 where ep is 1. They are of tokens on "
        "their way to experts of other ranks.",
        lambda p: replace(p, pipelines=(moved(p.pipelines[0], expert_pieces=2),)),
    ),
    "rows of scores where no keys come": (
        "pipelines[0].stages[0].scores = 'rows': expected \"blocks\" where head_ways is cp. Its "
        "ranks see all keys of their heads: there is nothing that cp hands on.",
        lambda p: replace(p, pipelines=(moved(p.pipelines[0], scores="rows"),)),
    ),
    "another model's": (
        "num_layers = 8: expected the model's (4).",
        lambda p: replace(p, num_layers=8),
    ),
    "interleaved with a stage over": (
        "'3 stages': expected a multiple of its 2 meshes",
        lambda p: replace(p, pipelines=(staged(p.pipelines[0], (0, 1, 0), "interleaved"),)),
    ),
    "fp64 beside fp32": (
        "['fp32', 'fp64']: expected fp64 for all stages or for none",
        lambda p: replace(p, pipelines=(differing(p.pipelines[0], precision="fp64"),)),
    ),
}


def moved(pipeline: PipelinePlan, **changes: object) -> PipelinePlan:
    stage = pipeline.stages[0]
    if "ranks" in changes:
        changes = {"mesh": Mesh(changes["ranks"], (("dp", 1),))}  # type: ignore[arg-type]
    return replace(pipeline, stages=(replace(stage, **changes),))  # type: ignore[arg-type]


def staged(
    pipeline: PipelinePlan, ranks: tuple[int, ...], schedule: str, device: str = "cpu"
) -> PipelinePlan:
    """Stages on these ranks; the first holds every layer, the others none."""
    stages = tuple(
        StagePlan(mesh=Mesh.of((rank,), dp=1), layers=(4 if s else 0, 4), device=device)
        for s, rank in enumerate(ranks)
    )
    return replace(pipeline, stages=stages, schedule=schedule)  # type: ignore[arg-type]


def differing(pipeline: PipelinePlan, **changes: str) -> PipelinePlan:
    """Two stages, the second with these settings."""
    first, second = staged(pipeline, (0, 1), "1f1b").stages
    return replace(pipeline, stages=(first, replace(second, **changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"precision": "fp4"},
            "precision = 'fp4': expected one of 'fp64', 'fp32', 'bf16', 'fp16', 'fp8', "
            "'fp8-rowwise', 'fp8-blockwise', 'fp8-fp64', 'fp8-rowwise-fp64', 'fp8-blockwise-fp64', "
            "'fp8-delayed', 'fp8-delayed-fp64'.",
        ),
        (
            {"recompute": "ful:2"},
            "recompute = 'ful:2': expected one of off, activation, core, attention, feed_forward, "
            "full, offload, chunks, offload_disk; full:3 is for the first three layers, "
            "core+full:3 for both. "
            "No mode 'ful'; did you mean full?",
        ),
        (
            {"recompute": "core+full:9"},
            "recompute = 'core+full:9': expected 4 layers at most, as the stage has. "
            "Without a number all of them recompute.",
        ),
        ({"zero": 7}, "zero = 7: expected one of 0, 1, 2, 3."),
        ({"zero": True}, "zero = true: expected one of 0, 1, 2, 3."),
        ({"compile": 1}, "compile = 1: expected a value of type bool."),
        ({"passes": 1.0}, "passes = 1.0: expected a value of type int."),
        ({"pieces": 2.0}, "pieces = 2.0: expected a value of type int."),
        ({"device": None}, "device = null: expected a value of type str."),
        (
            {"layers": (0, 3.4)},
            "layers = [0, 3.4]: expected layers from 0 to 4, with a half where one is cut.",
        ),
        ({"mesh": (0,)}, "mesh = [0]: expected a value of type Mesh."),
    ],
)
def test_values_of_a_stage_are_those_of_its_type(change: dict[str, Any], message: str) -> None:
    plan = data_parallel([6])
    changed = replace(plan, pipelines=(moved(plan.pipelines[0], **change),))
    with pytest.raises(ConfigError) as refused:
        validate_plan(changed, num_layers=4, global_batch=6)
    assert str(refused.value) == f"pipelines[0].stages[0].{message}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "1F1B"}, "schedule = '1F1B': expected one of 'gpipe', '1f1b',"),
        ({"samples": 6.0}, "samples = 6.0: expected a value of type int."),
        ({"microbatch": "2"}, "microbatch = '2': expected a value of type int."),
    ],
)
def test_values_of_a_pipeline_are_those_of_its_type(change: dict[str, Any], message: str) -> None:
    plan = data_parallel([6])
    changed = replace(plan, pipelines=(replace(plan.pipelines[0], **change),))
    with pytest.raises(ConfigError) as refused:
        validate_plan(changed, num_layers=4, global_batch=6)
    assert str(refused.value).startswith(f"pipelines[0].{message}")


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_is_allowed(name: str) -> None:
    message, broken = REFUSED[name]
    plan = data_parallel([6])
    validate_plan(plan, num_layers=4, global_batch=6)
    with pytest.raises(ConfigError) as refused:
        validate_plan(broken(plan), num_layers=4, global_batch=6)
    assert message in str(refused.value)


def test_one_job_may_run_on_two_families_of_devices() -> None:
    plan = data_parallel([6])
    mixed = replace(plan, pipelines=(differing(plan.pipelines[0], device="cuda"),))
    validate_plan(mixed, num_layers=4, global_batch=6)
    on_gpus = staged(plan.pipelines[0], (0, 1), "1f1b", device="cuda")
    validate_plan(replace(plan, pipelines=(on_gpus,)), num_layers=4, global_batch=6)
    side_by_side = data_parallel([3, 3])
    first, second = side_by_side.pipelines
    on_gpu = replace(second, stages=(replace(second.stages[0], device="cuda"),))
    validate_plan(replace(side_by_side, pipelines=(first, on_gpu)), num_layers=4, global_batch=6)
