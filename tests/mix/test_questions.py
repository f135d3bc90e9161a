"""A bench's plans are the planner's, and follow what was measured of the chips."""

from dataclasses import replace

import pytest
from mix.mix_cases import BIG, CLUSTER, KINDS, SMALL, SPEC, WORK, answers, chips_of, part_trial

from weft.config.errors import ConfigError
from weft.mix.chips import Shown, after_run, after_shortage, kinds_of, only
from weft.mix.questions import POOLED, Question, ask, micro_of, recomputes
from weft.plan.plan import Plan
from weft.planner.problem import Options, Problem
from weft.planner.renumber import renumbered
from weft.planner.search import NoPlan, search
from weft.planner.validate import validate_plan

LONG = replace(WORK, seq_len=16 * WORK.seq_len)
"""Samples of which what is kept is more than what computing again takes besides."""


def samples_of(plan: Plan) -> list[int]:
    """Of each rank."""
    return [sum(map(len, plan.rank_plan(r).microbatches())) for r in range(plan.world_size)]


def kinds_in(plan: Plan) -> list[set[int]]:
    """The ranks of each pipeline."""
    return [
        {rank for stage in pipeline.stages for rank in stage.mesh.ranks}
        for pipeline in plan.pipelines
    ]


def test_kinds_and_the_part_of_a_cluster_that_has_one() -> None:
    assert kinds_of(CLUSTER) == KINDS
    part = only(CLUSTER, "small")
    assert [(host.name, len(host.chips)) for host in part.hosts] == [("a", 1), ("b", 1)]
    assert part.links == CLUSTER.links
    with pytest.raises(ConfigError, match="at least two kinds"):
        kinds_of(part)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (0, {"max_stages": 1, "max_split": 1}),
        (1, {"max_pipelines": 1, "max_ranks": 1}),
        (2, {"max_pipelines": 1, "max_stages": 2}),
    ],
)
def test_generations_are_searches(number: int, told: dict[str, int]) -> None:
    """By shares, layers and meshes: nothing else decides them. A kind is searched as if it had its
    node's way out alone."""
    trial, chips = answers()[1:][number], chips_of()
    options = Options(micros=(2,), leave_idle=False, **told)
    best = search(Problem(WORK, chips.pools, knowledge=chips.knowledge, options=options)).best
    assert trial.plan == renumbered(best.plan, best.cluster, chips.by_rank)
    assert trial.generation == str(number + 1) and trial.name.startswith(f"{number + 1}: ")
    assert chips.time(trial.plan, WORK).step_s == pytest.approx(best.time.step_s, rel=3e-3)


def test_each_part_alone_is_a_search() -> None:
    for kind in KINDS:
        trial, chips = part_trial(kind.name), chips_of(kind.name)
        options = Options(micros=(2,), leave_idle=False)
        best = search(Problem(WORK, chips.pools, knowledge=chips.knowledge, options=options)).best
        assert trial.plan == renumbered(best.plan, best.cluster, chips.by_rank)
        assert trial.plan.world_size == len(kind.ranks)


@pytest.mark.parametrize("samples", [28, 25, 3])
def test_every_plan_is_valid_and_leaves_no_chip_idle(samples: int) -> None:
    work, shapes = replace(WORK, samples=samples), {}
    for kind in KINDS:
        trial = ask(Question("alone", 2), work, chips_of(kind.name))
        validate_plan(trial.plan, num_layers=SPEC.num_layers, global_batch=samples)
        assert trial.plan.world_size == len(kind.ranks)
        shapes |= trial.shapes
    for generation in ("pooled", "1", "2", "3"):
        trial = ask(Question(generation, 2, shapes), work, chips_of())
        validate_plan(trial.plan, num_layers=SPEC.num_layers, global_batch=samples)
        assert trial.plan.world_size == 3


def test_what_is_pooled_keeps_the_shapes_of_its_parts() -> None:
    """Only the shares of the batch change, and follow what the parts reach."""
    planned = answers()[0]
    assert planned.name == POOLED
    assert kinds_in(planned.plan) == [set(BIG.ranks), set(SMALL.ranks)]
    assert planned.shapes == {**part_trial("big").shapes, **part_trial("small").shapes}
    (given,) = part_trial("small").shapes["small"]
    other = replace(given, axes={"dp": 1, "tp": 1}, meshes=2, micro=1, recompute="full")
    shapes = {**planned.shapes, "small": (other,)}
    pooled = ask(Question("pooled", 2, shapes), WORK, chips_of())
    assert pooled.shapes["small"] == (other,) != planned.shapes["small"]
    assert len(pooled.plan.pipelines[1].positions()) == 2


def test_a_share_below_the_microbatch_of_a_part_takes_a_smaller_one() -> None:
    slow = chips_of(shown=Shown(slower={"small": 40.0}))
    (given,) = part_trial("small", micro=4).shapes["small"]
    shapes = {**answers()[0].shapes, "small": (given,)}
    plan = ask(Question("pooled", 4, shapes), WORK, slow).plan
    assert plan.pipelines[1].samples < given.micro == 8
    assert plan.pipelines[1].stages[0].mesh.axes == (("dp", 2), ("tp", 1))


def test_shares_and_layers_follow_measured_rates() -> None:
    """In a run the small chips computed twice as long as was predicted."""
    trial, chips = answers()[1], chips_of()
    assert samples_of(trial.plan) == [16, 6, 6]
    predicted = chips.time(trial.plan, WORK)
    busy = [predicted.timelines[0].busy_s[0], *predicted.timelines[1].busy_s * 2]
    assert after_run(Shown(), chips, trial.plan, WORK, busy).slower == pytest.approx(
        {"big": 1.0, "small": 1.0}
    )
    shown = after_run(Shown(), chips, trial.plan, WORK, [busy[0], 2 * busy[1], 2 * busy[2]])
    assert shown.slower == pytest.approx({"big": 1.0, "small": 2.0})
    again = ask(trial.question, WORK, chips_of(shown=shown))
    assert samples_of(again.plan) == [20, 4, 4]
    twice = after_run(shown, chips_of(shown=shown), again.plan, WORK, [1.0, 0.5, 0.5])
    once = after_run(Shown(), chips, again.plan, WORK, [1.0, 0.5, 0.5])
    assert twice.slower == pytest.approx(once.slower), "what was known before does not matter"


def test_a_plan_that_ran_out_of_memory_is_not_asked_for_again() -> None:
    chips = chips_of("big")
    trial = ask(Question("alone", 2), LONG, chips)
    assert not recomputes(trial.plan)
    (need,) = chips.memory_gib(trial.plan, LONG)
    shown = after_shortage(Shown(), chips, rank=0, gib=0.99 * need / 0.92)
    other = ask(trial.question, LONG, chips_of("big", shown))
    assert recomputes(other.plan) and other.name.endswith(", recompute")
    assert chips.memory_gib(other.plan, LONG)[0] < need
    with pytest.raises(NoPlan):
        ask(trial.question, LONG, chips_of("big", replace(shown, memory_gib={"big": 0.01})))


def test_a_name_says_the_micro_batches_that_the_plan_has() -> None:
    """Smaller than asked for, where a step has fewer samples: as the notes on it say."""
    trial = ask(Question("alone", 4), replace(WORK, samples=3), chips_of("big"))
    assert [pipeline.microbatch for pipeline in trial.plan.pipelines] == [3]
    (pipeline,) = trial.plan.pipelines
    assert micro_of([(pipeline, pipeline.stages[0])]) == "3" and trial.name.endswith(", micro 3")


def test_ranks_that_recompute_are_named() -> None:
    chips = chips_of("big")
    (need,) = chips.memory_gib(ask(Question("alone", 2), LONG, chips).plan, LONG)
    shown = after_shortage(Shown(), chips, rank=0, gib=0.99 * need / 0.92)
    trial = ask(Question("1", 2), LONG, chips_of(shown=shown))
    again = {r for _, _, s in trial.plan.stages() if s.recompute == "full" for r in s.mesh.ranks}
    assert again == {0}
    assert trial.name == "1: data parallel by speed, micro 2, recompute on rank 0"
