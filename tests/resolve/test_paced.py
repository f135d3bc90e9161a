"""Plans for ranks that compute slower or faster than their chips' rates say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resolve.test_left import MIXED

from weft.cluster.cluster import Cluster, Node
from weft.config.errors import ConfigError
from weft.config.load import Loaded, load_config
from weft.plan.plan import Plan
from weft.resolve import paced
from weft.resolve.paced import (
    ALIKE,
    MOST_PACES,
    at_paces,
    better_plan,
    few,
    held_back,
    refuse_unknown,
)
from weft.resolve.planned import Chosen
from weft.resolve.prediction import chips_here, predict_run
from weft.resolve.resolve import Resolved, resolve
from weft.train.loop import waits_for_reads

BATCH = [
    "batch.samples=16",
    "batch.micro=1",
    "data.seq_len=64",
    "compute.device=cpu",
    "compute.precision=fp32",
]
FLAT = "plan={auto: {max_stages: 1}}"


def asked(machine: Node, *words: str, plan: Plan | None = None) -> tuple[Loaded, Resolved]:
    loaded = load_config("debug", [*BATCH, *words])
    return loaded, resolve(loaded, Cluster(nodes=(machine,)), plan=plan)


def flat(machine: Node, *shares: int) -> tuple[Loaded, Resolved]:
    """Nothing but shares may be chosen."""
    _, first = asked(machine, f"plan.shares={list(shares)}")
    return asked(machine, FLAT, plan=first.plan)


def samples(plan: Plan) -> list[int]:
    return [sum(map(len, plan.rank_plan(r).microbatches())) for r in range(plan.world_size)]


@given(st.lists(st.floats(0.2, 8.0), min_size=1, max_size=16))
def test_a_few_paces_stand_for_all(paces: list[float]) -> None:
    found = few(paces)
    kinds = sorted(set(found))
    assert len(kinds) <= MOST_PACES
    assert all(after / before >= ALIKE * 0.999 for before, after in pairwise(kinds))
    both = sorted(zip(paces, found, strict=True))
    assert [pace for _, pace in both] == sorted(found), "who is slower stays so"
    if max(paces) < ALIKE * min(paces):
        assert len(kinds) == 1


def test_few_keeps_what_is_apart() -> None:
    assert few([1.0, 2.0, 1.0, 4.0]) == pytest.approx([1.0, 2.0, 1.0, 4.0])
    assert few([1.0, 1.1, 3.0]) == pytest.approx([1.1**0.5, 1.1**0.5, 3.0])


def test_chips_at_paces_take_so_many_times_as_long(machine: Node) -> None:
    _, now = flat(machine, 8, 8)
    one = predict_run(now)
    many = predict_run(now, chips=at_paces(chips_here(now), (3.0, 3.0)))
    assert many.busy_s == pytest.approx([3 * each for each in one.busy_s], rel=0.05)
    apart = predict_run(now, chips=at_paces(chips_here(now), (1.0, 3.0)))
    assert apart.busy_s == pytest.approx([one.busy_s[0], many.busy_s[1]], rel=0.01)
    pools = at_paces(chips_here(now), (1.0, 3.0)).view
    assert pools.share_a_node((0, 1))


def test_a_slow_rank_gets_less(machine: Node) -> None:
    loaded, now = flat(machine, 8, 8)
    better = better_plan(loaded, now, (1.0, 3.0))
    assert better.seats == (0, 1)
    assert samples(better.plan) == [12, 4]
    assert better.now_s / better.step_s == pytest.approx(2.0, rel=0.05)


def test_no_plan_is_taken_under_which_ranks_cannot_be_watched(machine: Node) -> None:
    """One of which the slow rank has a third of the heads would be fastest."""
    heads = ("model.d_model=48", "model.d_ff=96", "model.num_heads=6", "model.num_kv_heads=6")
    dp = ("plan.stages=[{dp: 2}]", "batch.samples=2", "batch.micro=2", *heads)
    for alarm, has_any in (("warn", True), ("replan", False)):
        loaded, now = asked(machine, *dp, "model.d_head=8", f"recovery.alarm={alarm}")
        better = better_plan(loaded, now, (2.0, 1.0))
        assert better.plan.has_unlike_shares == has_any, better.plan


def test_a_rank_that_is_well_again_gets_its_part_back(machine: Node) -> None:
    loaded, now = flat(machine, 12, 4)
    better = better_plan(loaded, now, (1.0, 1.0))
    assert samples(better.plan) == [8, 8]
    assert better.now_s / better.step_s == pytest.approx(1.5, rel=0.05)


def test_ranks_at_one_pace_are_neighbours_and_the_first_stays(machine: Node) -> None:
    """Each keeps its process; the slow ones are a kind of chip of their own."""
    loaded, now = flat(replace(machine, cores=4), 4, 4, 4, 4)
    better = better_plan(loaded, now, (3.0, 1.0, 3.1, 1.0))
    assert better.seats == (0, 2, 1, 3)
    assert better.paces == pytest.approx([3.05, 3.05, 1, 1], rel=0.01)
    assert samples(better.plan) == [2, 2, 6, 6]


def test_a_mesh_goes_at_the_pace_of_its_slowest(machine: Node) -> None:
    """Two ranks that share their samples as one mesh are told apart by the plan that follows."""
    loaded, now = asked(machine, "plan.stages=[{dp: 2}]", "batch.micro=2")
    whole = better_plan(loaded, now, (3.0, 3.0)).now_s
    assert better_plan(loaded, now, (1.0, 3.0)).now_s == pytest.approx(whole)


def test_a_pipeline_that_divides_its_head_keeps_its_order(machine: Node) -> None:
    """None is made for parts of the head, whatever its ranks' paces."""
    head = ("plan.stages=[{layers: 1}, {}]", "plan.head=[1, 3]")
    loaded, now = asked(machine, *head, "model.num_layers=2", "batch.micro=1")
    better = better_plan(loaded, now, (1.0, 1.0))
    assert better.step_s <= better.now_s


WIDE = [
    *["model.num_layers=2", "model.d_model=256", "model.d_ff=1024", "model.d_head=64"],
    *["model.num_heads=4", "model.num_kv_heads=4"],
]


def test_the_new_plan_fits_too(machine: Node) -> None:
    """What would be faster with samples side by side is a pipeline where memory is short."""
    stages = "plan.stages=[{layers: 1}, {}]"
    found = []
    for memory_gib in (0.4, 0.11):
        small = replace(machine, memory_gib=memory_gib)
        better = better_plan(*asked(small, stages, *WIDE), (1.0, 2.0))
        found.append([len(pipeline.positions()) for pipeline in better.plan.pipelines])
        assert better.plan.global_batch == 16
    assert found == [[1, 1], [2]]


def test_where_no_border_pays_the_list_is_made_anew(
    machine: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner knows nothing better than the plan of now: it keeps all but its order."""
    loaded, now = asked(machine, "plan.stages=[{layers: 1}, {}]", "plan.schedule=gpipe", *WIDE)

    def same(*_: object) -> Chosen:
        return Chosen(plan=now.plan, notes=(), asked={})

    monkeypatch.setattr(paced, "choose", same)
    better = better_plan(loaded, now, (2.0, 1.0))
    (was,), (made,) = now.plan.pipelines, better.plan.pipelines
    assert made.lists or made.in_flight or made.schedule != was.schedule
    assert replace(made, schedule=was.schedule, in_flight=(), lists=()) == was
    assert better.step_s < 0.98 * better.now_s
    assert better.seats == (0, 1)


def test_ranks_with_samples_of_their_own_number_keep_their_pace(machine: Node) -> None:
    _, now = asked(machine, "plan.stages=[{dp: 2}]", "batch.micro=4")
    assert held_back(now.plan, (1.0, 3.0)) == (3.0, 3.0)
    unlike = now.plan.each(lambda stage: replace(stage, sample_shares=(3, 1)))
    assert held_back(unlike, (1.0, 3.0)) == (1.0, 3.0)


def refused(now: Resolved, busy_s: tuple[float, ...] = (1.0, 1.0), problem: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_unknown(now, busy_s, problem, reads_wait=waits_for_reads(now.plan))
    return str(caught.value)


def test_what_cannot_be_planned_again_is_refused(machine: Node) -> None:
    _, two = asked(machine, "plan.shares=[8,8]")
    refuse_unknown(two, (1.0, 1.0), "", reads_wait=False)
    head = "recovery.alarm = 'replan': expected off or warn "
    assert refused(two, (), "there is no profile; run `weft chips profile`") == (
        f"{head}where no time is predicted. There is no profile; run `weft chips profile`."
    )
    _, one = asked(machine, "plan.shares=[16]")
    assert refused(one).startswith(f"{head}with one rank.")
    stages = "plan.stages=[{precision: fp32}, {precision: bf16}]"
    _, several = asked(machine, stages)
    assert refused(several).startswith(f"{head}where stages compute in bf16 and fp32.")
    _, unlike = asked(machine, "plan.stages=[{tp: 2, width_shares: [3, 1]}]", *WIDE)
    assert refused(unlike) == (
        f"{head}where ranks of a stage have unlike shares. What each of them should take is not "
        "predicted: leave sample_shares, expert_shares, width_shares and state_shares out."
    )
    loaded = load_config("debug", ["batch.samples=15", "batch.micro=1", "plan.shares=[5,5,5]"])
    cards = resolve(loaded, Cluster(nodes=(MIXED,)))
    assert refused(cards).startswith(f"{head}where ranks compute on accelerators.")
