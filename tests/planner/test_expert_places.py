"""Which rank has which expert: by loads and paces, as a plan says it, and in a run that moves."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from parity.cases import Case
from tiers.test_state_of_runs import bits
from train.small_jobs import SMALL, STEPS, job, losses
from train.test_life import live

from weft.config.errors import ConfigError
from weft.cost.choice import choice_of
from weft.cost.memory import memory_of_plan
from weft.elastic.loads import Loads
from weft.elastic.pool import WorkerPool
from weft.models.registry import param_specs
from weft.parallel.params import param_tilings
from weft.plan.box import Box
from weft.plan.model import ExpertsSpec
from weft.plan.plan import Plan, ZeroLevel
from weft.planner.expert_places import (
    places_of,
    refuse_idle_moves,
    refuse_wrong_places,
    slowest_part,
    with_places,
)

CASE = Case("x", shares=(4,), dp=((1,),), ep=((2,),), experts=ExpertsSpec(count=4, top_k=2))
SPEC = CASE.rehearsal().spec
PLAN = CASE.plan()
EVEN = {layer: [5, 5, 5, 5] for layer in range(1, 4)}


def placed(*places: tuple[int, ...]) -> Plan:
    return PLAN.each(lambda stage: replace(stage, expert_places=places))


def test_as_few_change_places_as_balance_needs() -> None:
    """Layer 0: [9, 7 | 3, 1] is 16 and 4; 9 for 3 makes 10 and 10. The others stay."""
    loads = {0: [9, 7, 3, 1], **EVEN}
    found = with_places(PLAN, SPEC, loads)
    (stage,) = (stage for _, _, stage in found.stages())
    assert places_of(stage, SPEC) == ((1, 0, 0, 1), *[(0, 0, 1, 1)] * 3)
    assert slowest_part(PLAN, SPEC, loads) == pytest.approx((16 + 30) / 40)
    assert slowest_part(found, SPEC, loads) == 1
    assert with_places(found, SPEC, loads) == found
    assert Plan.from_json(found.to_json()) == found


def test_a_fast_rank_gets_more() -> None:
    """Rank 1 takes half as long: 20 tokens, of which it should have two thirds."""
    loads = {layer: [7, 7, 3, 3] for layer in range(4)}
    found = with_places(PLAN, SPEC, loads, paces=[1.0, 0.5])
    (stage,) = (stage for _, _, stage in found.stages())
    for places in places_of(stage, SPEC):
        assert sum(load for load, place in zip([7, 7, 3, 3], places, strict=True) if place) == 14
    assert slowest_part(found, SPEC, loads, [1.0, 0.5]) == pytest.approx(7 / 6.5)


def test_what_saves_little_stays() -> None:
    """46 and 44 tokens of 90 could be 45 and 45: 2 % are no reason."""
    assert with_places(PLAN, SPEC, {0: [6, 5, 5, 4], **EVEN}) == PLAN


def test_one_that_all_want_is_copied_where_no_change_of_places_helps() -> None:
    """Expert 0 has 20 of 28 tokens: 23 beside 5, with the fewest 22 beside 6, which is not worth a
    move. With a copy of it 12 and 16, and with one more of 3 tokens 13.5 and 14.5."""
    loads = {layer: [20, 3, 3, 2] for layer in range(4)}
    alone = with_places(PLAN, SPEC, loads)
    assert slowest_part(alone, SPEC, loads) == pytest.approx(23 / 14)
    found = with_places(PLAN, SPEC, loads, copies=1)
    (stage,) = (stage for _, _, stage in found.stages())
    assert {places_of(stage, SPEC)[layer][0] for layer in range(4)} == {(0, 1)}
    assert slowest_part(found, SPEC, loads) == pytest.approx(16 / 14)
    assert with_places(found, SPEC, loads, copies=1) == found
    more = with_places(found, SPEC, loads, copies=2)
    assert slowest_part(more, SPEC, loads) == pytest.approx(14.5 / 14)
    even = with_places(found, SPEC, {n: [5, 5, 5, 5] for n in range(4)}, copies=1)
    (stage,) = (stage for _, _, stage in even.stages())
    assert {*map(type, places_of(stage, SPEC)[0])} == {int}, "nobody wants it any more"
    assert Plan.from_json(found.to_json()) == found
    held = param_tilings(found, SPEC)
    first = next(p for p in param_specs(SPEC) if p.of_experts and p.unit == 0)
    assert {rank: sum(box.size[0] for box in boxes) for rank, boxes in
            held[first.name].boxes.items()} == {0: 3, 1: 2}  # fmt: skip


def test_copies_take_memory_and_a_part_of_the_tokens() -> None:
    """Of four experts the first has a copy: the ranks hold 2 and 3 where 2 are even, of which their
    holders divide 1.5 and 2.5; with as many tokens for each expert they compute as much."""
    plan = placed(((0, 1), 0, 1, 1), *[((0, 1), 0, 1, 1)] * 3)
    found = [choice_of(plan.pipelines[0], 0, 16, rank=rank).work for rank in (0, 1, None)]
    assert [work.expert_part for work in found] == [1.0, 1.5, 1.5]
    assert [work.expert_kept for work in found] == [0.75, 1.25, 1.25]
    assert [work.expert_visits for work in found] == [0.75, 1.25, 1.25]
    alone = placed((0, 0, 1, 1), *[(0, 0, 1, 1)] * 3)
    own = sum(param.numel for param in param_specs(SPEC) if param.of_experts) / 4
    for zero, each in ((0, 8 + 8 + 16), (2, 8)):  # fp64: weights, and what nobody divides

        def whole(plan: Plan, zero: ZeroLevel = zero) -> float:
            shared = plan.each(lambda stage: replace(stage, zero=zero))
            by_rank = memory_of_plan(shared, SPEC, seq_len=16)
            return by_rank[1].weights + by_rank[1].grads + by_rank[1].optimizer

        divided = 0 if zero == 0 else 8 + 16
        assert whole(plan) - whole(alone) == pytest.approx(own * (each + divided / 2))


def test_boxes_are_those_of_the_places() -> None:
    plan = placed((0, 1, 1, 0), *[(0, 0, 1, 1)] * 3)
    held = param_tilings(plan, SPEC)
    first = next(p for p in param_specs(SPEC) if p.of_experts and p.unit == 0)
    rest = first.shape[1:]
    zeros = (0,) * len(rest)

    def rows(low: int, many: int) -> Box:
        return Box((low, *zeros), (many, *rest))

    assert held[first.name].boxes == {0: (rows(0, 1), rows(3, 1)), 1: (rows(1, 2),)}
    assert held[first.name.replace("layers.0", "layers.1")].boxes[0] == (rows(0, 2),)


@pytest.mark.parametrize(
    ("places", "problem"),
    [
        ([(0, 1, 1, 0)], "expected one place for each expert of its layers"),
        ([(0, 1)] * 4, "expected one place for each expert of its layers"),
        ([(0, 0, 0, 0)] * 4, "expected each of the places 0 to 1 at least once"),
        ([(0, 1, 2, 0)] * 4, "expected each of the places 0 to 1 at least once"),
        ([(0, 1, (0, 0), 0)] * 4, "expected each of the places 0 to 1 at least once"),
        ([(0, 1, (), 0)] * 4, "expected each of the places 0 to 1 at least once"),
        ([(0, 1, (1, 2), 0)] * 4, "expected each of the places 0 to 1 at least once"),
    ],
)
def test_other_places_are_refused(places: list[tuple[int, ...]], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        refuse_wrong_places(placed(*places), SPEC)


def test_nobody_to_change_places_with() -> None:
    one = Case("y", shares=(4,), experts=ExpertsSpec(count=4, top_k=2)).plan()
    with pytest.raises(ConfigError, match="move_experts = 'a section': expected null"):
        refuse_idle_moves(one)
    with pytest.raises(ConfigError, match="expected nothing where ep is 1"):
        refuse_wrong_places(
            one.each(lambda stage: replace(stage, expert_places=((0,) * 4,) * 4)), SPEC
        )


class Replans:
    """A job whose plan changes as it is asked."""

    def __init__(self, out: Path) -> None:
        self.job = SimpleNamespace(plan=PLAN, out=out, last_step=100, began=0.0)
        self.spec, self.paces, self.seats = SPEC, (), (0, 1)

    def under(self, plan: Plan) -> str:
        self.job.plan = plan
        return ""


def test_the_launcher_looks_now_and_then(tmp_path: Path) -> None:
    """Not before so many steps, once for what it has seen, and not at the end."""
    replans, said = Replans(tmp_path), list[str]()
    loads = Loads(replans, 10, said.append)  # type: ignore[arg-type]

    def steps(*numbers: int, first: list[int]) -> None:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            for step in numbers:
                told: dict[str, Any] = {"0": first, **{str(n): each for n, each in EVEN.items()}}
                line = {"step": step, "loss": 1.0, "tokens_per_expert": told}
                file.write(json.dumps(line) + "\n")

    assert not loads.wanted()
    steps(1, 6, first=[5, 5, 5, 5])
    assert not loads.wanted()
    steps(11, first=[9, 7, 3, 1])
    assert loads.wanted() and loads.wanted()
    loads.epoch()
    assert replans.job.plan == with_places(PLAN, SPEC, {0: [9, 7, 3, 1], **EVEN}) != PLAN
    steps(16, first=[1, 7, 3, 9])
    assert not loads.wanted(), "it is too early"
    assert not loads.wanted() and "experts have changed places" in said[0]
    steps(21, 26, first=[9, 7, 3, 1])
    assert not loads.wanted(), "they are where they should be"
    steps(100, first=[9, 7, 3, 99])
    assert not loads.wanted()


def test_a_run_goes_on_with_experts_elsewhere(tmp_path: Path, pool: WorkerPool) -> None:
    """And with a copy of one more: losses and the last checkpoint are the same in fp64."""
    asked = [
        *[*SMALL, "model.experts={count: 4, top_k: 2}", "compute.precision=fp64"],
        *["plan.stages=[{dp: 1, ep: 2}]", "batch.micro=2", "checkpoint.every=1"],
        "train.eval_every=0",
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    whole, first, last = job(asked, one, STEPS), job(asked, two, 2), job(asked, two, STEPS)
    num_layers = whole.plan.num_layers
    there = tuple((n % 2, 1, (0, 1), 1 - n % 2) for n in range(num_layers))
    moved = last.plan.each(lambda stage: replace(stage, expert_places=there))
    pool.run(live, [whole], world_size=2)
    pool.run(live, [first, replace(last, plan=moved)], world_size=2)
    assert losses(two) == pytest.approx(losses(one), rel=1e-12)
    kept, found = bits(one), bits(two)
    assert kept.keys() == found.keys()
    for name, values in kept.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-10, atol=1e-14, err_msg=name)
