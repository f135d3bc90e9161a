"""Ranks of one mesh that compute and keep unlike shares: what each has, and what is refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config.errors import ConfigError
from weft.cost.choice import choice_of, state_parts
from weft.models.registry import FAMILIES
from weft.parallel.buckets import ALIGN, fill_buckets
from weft.parallel.params import held_pieces, param_tilings
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.validate import validate_plan
from weft.simulate.step import StepTime
from weft.train.alarm import equals

FAMILY = FAMILIES["llama"]
SPEC = FAMILY.sizes["debug-1m"]


def side_by_side(*stages: Mapping[str, Any], micro: int = 4) -> Plan:
    """A pipeline of one stage for each, of the axes and settings given."""
    pipelines, first = [], 0
    for asked in stages:
        axes = {name: asked.get(name, 1) for name in ("dp", "tp")}
        ranks = range(first, first + axes["dp"] * axes["tp"])
        rest = {name: value for name, value in asked.items() if name not in axes}
        stage = StagePlan(mesh=Mesh.of(ranks, **axes), layers=(0, SPEC.num_layers), **rest)
        pipelines.append(PipelinePlan(stages=(stage,), samples=4, microbatch=micro))
        first = ranks.stop
    return Plan(num_layers=SPEC.num_layers, pipelines=tuple(pipelines))


@given(st.integers(0, 40), st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
def test_samples_go_by_weight_and_none_is_lost(samples: int, shares: list[int]) -> None:
    mesh = Mesh.of(range(2 * len(shares)), dp=len(shares), tp=2)
    split = mesh.split_samples(samples, shares)
    firsts = [part for rank, part in split.items() if mesh.is_first_with_samples(rank)]
    assert [n for part in firsts for n in part] == list(range(samples))
    for part, share in zip(firsts, shares, strict=True):
        assert abs(len(part) - samples * share / sum(shares)) < 1
    for one, other in mesh.groups("tp"):
        assert split[one] == split[other], "they compute the same samples"


def test_a_plan_keeps_them_in_its_file() -> None:
    plan = side_by_side({"dp": 2, "zero": 2, "sample_shares": (3, 1), "state_shares": (0, 5)})
    assert Plan.from_json(plan.to_json()) == plan
    assert "shares" not in side_by_side({"dp": 2, "zero": 2}).to_json()


@pytest.mark.parametrize(
    "stages",
    [
        [{"dp": 2, "zero": 1, "state_shares": (1, 7)}],
        [{"dp": 3, "zero": 3, "state_shares": (0, 1, 3)}],
        [{"dp": 2, "tp": 2, "zero": 2, "state_shares": (1, 0, 4, 3)}],
        [{"zero": 1, "state_shares": (0,)}, {"dp": 2, "zero": 1}],
        [{"zero": 2, "state_shares": (5,)}, {"tp": 2, "zero": 2, "state_shares": (2, 1)}],
    ],
)
def test_predicted_parts_are_those_of_the_buckets(stages: list[dict[str, Any]]) -> None:
    plan = side_by_side(*stages)
    pieces = held_pieces(plan, FAMILY.param_specs(SPEC), param_tilings(plan, SPEC))
    buckets = fill_buckets([held for cut in pieces.values() for held in cut], 4)
    kept = dict.fromkeys(range(plan.world_size), 0)
    for bucket in buckets:
        for rank in bucket.ranks:
            kept[rank] += sum(each.box.numel for each in bucket.kept(rank))
    held = {
        rank: sum(e.box.numel for b in buckets if rank in b.ranks for e in b.entries)
        for rank in kept
    }
    parts = {rank: part for of in state_parts(plan).values() for rank, part in of.items()}
    assert parts.keys() == kept.keys()
    assert sum(kept.values()) == sum(param.numel for param in FAMILY.param_specs(SPEC))
    for rank, part in parts.items():
        slack = 2 * ALIGN * len(buckets) / held[rank] + 0.1 * ("tp" in stages[-1])
        assert kept[rank] / held[rank] == pytest.approx(part, abs=slack)
        assert bool(kept[rank]) == bool(part)


def test_the_busiest_rank_is_what_a_stage_waits_for() -> None:
    (pipeline,) = side_by_side({"dp": 3, "sample_shares": (3, 1, 0)}).pipelines
    assert choice_of(pipeline, 0, 16).work.samples == 3
    assert [choice_of(pipeline, 0, 16, rank=r).work.samples for r in range(3)] == [3, 1, 0]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "samples of too few": (
        {"dp": 3, "sample_shares": (7, 1)},
        "sample_shares = [7, 1]: expected a number for each part of the samples of its mesh (3)",
    ),
    "samples of nobody": (
        {"dp": 2, "sample_shares": (0, 0)},
        "sample_shares = [0, 0]: expected a number above 0 for somebody.",
    ),
    "samples that are fewer than ranks": (
        {"dp": 2, "sample_shares": (70, 1)},
        "sample_shares = [70, 1]: expected weights with which each above 0 has one of the 4 "
        "samples of a micro-batch. Give it 0, or make micro-batches larger.",
    ),
    "passes of fewer samples": (
        {"dp": 2, "sample_shares": (2, 2), "passes": 3},
        "passes = 3: expected at most 2, the samples that a rank has of a micro-batch",
    ),
    "state below nothing": (
        {"dp": 2, "zero": 1, "state_shares": (-1, 2)},
        "state_shares = [-1, 2]: expected a number for each rank of its mesh (2), 0 or more.",
    ),
    "state that is not divided": (
        {"dp": 2, "state_shares": (1, 2)},
        "state_shares = [1, 2]: expected null. They are of what zero divides",
    ),
    "state of nobody": (
        {"dp": 2, "tp": 2, "zero": 2, "state_shares": (1, 0, 1, 0)},
        "state_shares = [1, 0, 1, 0]: expected weights above 0 for some of the ranks that hold "
        "the same parameters. Nobody would keep the state of layer 0.",
    ),
    "samples that cancel out": (
        {"dp": 2, "sample_shares": (1, -1)},
        "sample_shares = [1, -1]: expected a number for each part of the samples of its mesh (2)",
    ),
    "words": (
        {"dp": 2, "zero": 1, "state_shares": ("one", 1)},
        "state_shares = 'one': expected a value of type int.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    stage, words = REFUSED[name]
    plan = side_by_side(stage)
    with pytest.raises(ConfigError) as refused:
        validate_plan(plan, num_layers=plan.num_layers, global_batch=plan.global_batch)
    assert f"pipelines[0].stages[0].{words}" in str(refused.value)


def test_stages_of_one_mesh_share_samples_alike() -> None:
    """A rank takes its samples by its first stage."""
    meshes = [Mesh.of((0, 1), dp=2), Mesh.of((2, 3), dp=2)]
    shares: list[tuple[int, ...]] = [(1, 1), (), (), (3, 1)]
    stages = tuple(
        StagePlan(mesh=meshes[m], layers=(n, n + 1), sample_shares=shares[n])
        for n, m in enumerate((0, 1, 1, 0))
    )
    line = PipelinePlan(stages=stages, samples=4, microbatch=4, schedule="zb-v")
    plan = Plan(num_layers=4, pipelines=(line,))
    with pytest.raises(ConfigError, match="one sample_shares and state_shares for all stages"):
        validate_plan(plan, num_layers=4, global_batch=4)


def test_nobody_is_held_to_what_another_should_take() -> None:
    """Ranks of unlike shares are not compared, and no time is predicted of each."""
    plan = side_by_side({"dp": 3, "zero": 1, "sample_shares": (2, 1, 1), "state_shares": (1, 1, 5)})
    assert len(set(equals(plan))) == 3
    assert StepTime((), (), 1.0).busy_s(plan) == ()
    widths = side_by_side({"dp": 2, "tp": 2}).each(
        lambda stage: replace(stage, mesh=stage.mesh.with_shares(tp=(3, 1)))
    )
    first, second, *others = equals(widths)
    assert others == [first, second] and first != second


def test_who_has_other_widths_keeps_no_state_of_those() -> None:
    """Of four quarters of a layer the first and the last; with like widths each keeps a half."""
    every = side_by_side(
        {"tp": 2, "zero": 1, "state_shares": (1, 0)}, {"tp": 2, "zero": 1, "state_shares": (0, 1)}
    )
    sizes = {"num_layers": every.num_layers, "global_batch": every.global_batch}
    validate_plan(every, **sizes)
    first, last = every.pipelines
    quarters = [
        replace(line, stages=tuple(replace(s, mesh=s.mesh.with_shares(tp=w)) for s in line.stages))
        for line, w in ((first, (1, 3)), (last, (3, 1)))
    ]
    with pytest.raises(ConfigError, match="Nobody would keep the state"):
        validate_plan(replace(every, pipelines=tuple(quarters)), **sizes)


def test_state_that_no_domain_may_lack() -> None:
    """Each has all of it: what is kept in the other does not count."""
    both = {"dp": 2, "zero": 1}
    plan = side_by_side({**both, "state_shares": (0, 0)}, both)
    validate_plan(plan, num_layers=plan.num_layers, global_batch=plan.global_batch)
    apart = Plan(num_layers=plan.num_layers, pipelines=plan.pipelines, domains=((0, 1), (2, 3)))
    with pytest.raises(ConfigError, match="Nobody would keep the state"):
        validate_plan(apart, num_layers=plan.num_layers, global_batch=plan.global_batch)
