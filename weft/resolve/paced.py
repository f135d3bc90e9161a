"""The plan for ranks that compute slower or faster than was predicted. No torch.

A rank's pace is how many times as long it computes as rates of its chip say. Paces that are near to
each other count as one, so that a search does not meet as many kinds of chip as there are ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import geometric_mean

from weft.cluster.cluster import Dtype
from weft.cluster.view import ChipPool, ClusterView
from weft.config.axes import UNLIKE
from weft.config.errors import ConfigError
from weft.config.load import Loaded
from weft.cost.operators import Op, Phase
from weft.cost.rates import CostFunction
from weft.cost.timing import Hardware
from weft.plan.plan import Plan
from weft.planner.problem import Problem
from weft.resolve.left import asked_again, cards_of, with_chips
from weft.resolve.orders import with_orders
from weft.resolve.planned import choose, options_asked, resources_of_ranks
from weft.resolve.prediction import chips_here
from weft.resolve.rank_chips import RankChips
from weft.resolve.resolve import Resolved

ALIKE = 1.15
"""Paces that differ by less are one."""
MOST_PACES = 3
"""Different ones that the planner is asked about."""
WORTH_MOVING = 0.02
"""Part of a step for which layers and samples stay where they are, and only the order is new."""


@dataclass(frozen=True, slots=True)
class Paced:
    """A chip that takes so many times as long for everything."""

    chip: CostFunction
    times: float

    def seconds(self, op: Op, phase: Phase, dtype: Dtype) -> float:
        """Of one phase of an operation."""
        return self.chip.seconds(op, phase, dtype) * self.times

    def moving_seconds(self, num_bytes: float) -> float:
        """As an optimizer moves bytes."""
        return self.chip.moving_seconds(num_bytes) * self.times


@dataclass(frozen=True, kw_only=True, slots=True)
class Better:
    """What the planner found for ranks at such paces."""

    plan: Plan
    seats: tuple[int, ...]
    """For each rank of the plan the one that its process is now."""
    chips: RankChips
    """Of its ranks."""
    paces: tuple[float, ...]
    """Likewise."""
    now_s: float
    """A step of the plan of now, at these paces."""
    step_s: float


def better_plan(loaded: Loaded, now: Resolved, paces: Sequence[float]) -> Better:
    """What ``plan: auto`` chooses for ranks at these paces, all of which have work: for the same
    batch, in the same arithmetic.

    Args:
        now: Its cluster has the chips of its ranks, in their order.

    Raises:
        NoPlan: nothing fits.
        ConfigError: there are no rates of such chips, or stages compute in several precisions.
    """
    plan = now.plan
    known = few(paces)
    kinds = list(zip(plan.devices, known, strict=True))
    # Ranks at one pace are neighbours: a pool of chips. Rank 0, who speaks for the job, stays.
    seats = sorted(
        range(plan.world_size),
        key=lambda r: (kinds[r][0] != kinds[0][0], kinds[r][0], kinds[r] != kinds[0], kinds[r][1]),
    )
    devices, cards = [plan.devices[rank] for rank in seats], cards_of(plan)
    (node,) = with_chips(now.cluster, devices, [cards[rank] for rank in seats]).nodes
    config = asked_again(loaded.config, plan)
    there = resources_of_ranks(config, node, devices)
    at = tuple(known[rank] for rank in seats)
    there = replace(there, chips=at_paces(there.chips, at))
    chosen = choose(config, there)
    used = chosen.plan.world_size
    here = at_paces(chips_here(now), held_back(plan, known))
    now_s, step_s = _seconds(now, plan, here), _seconds(now, chosen.plan, there.chips)
    made = with_orders(plan, replace(_problem(now, here), options=options_asked(config)))
    if made.time.step_s <= (1 + WORTH_MOVING) * step_s:
        return Better(
            plan=made.plan,
            seats=tuple(range(plan.world_size)),
            chips=here,
            paces=held_back(plan, known),
            now_s=now_s,
            step_s=made.time.step_s,
        )
    return Better(
        plan=chosen.plan,
        seats=tuple(seats[:used]),
        chips=there.chips,
        paces=at[:used],
        now_s=now_s,
        step_s=step_s,
    )


def _problem(now: Resolved, chips: RankChips) -> Problem:
    known = replace(chips.knowledge, tf32=now.config.compute.tf32)
    return Problem(now.open_workload, chips.view, known)


def _seconds(now: Resolved, plan: Plan, chips: RankChips) -> float:
    return _problem(now, chips).time(plan).step_s


def few(paces: Sequence[float]) -> tuple[float, ...]:
    """For each rank the mean of those near to its own, few different ones in all."""
    groups = [[pace] for pace in sorted(set(paces))]

    def apart(number: int) -> float:
        return geometric_mean(groups[number + 1]) / geometric_mean(groups[number])

    while len(groups) > 1:
        nearest = min(range(len(groups) - 1), key=apart)
        if len(groups) <= MOST_PACES and apart(nearest) >= ALIKE:
            break
        groups[nearest] += groups.pop(nearest + 1)
    means = {pace: geometric_mean(group) for group in groups for pace in group}
    return tuple(means[pace] for pace in paces)


def held_back(plan: Plan, paces: Sequence[float]) -> tuple[float, ...]:
    """Ranks of one mesh do each thing together, at the pace of the slowest, unless each has samples
    of its own number: those are timed one by one."""
    found = list(paces)
    for _, _, stage in plan.stages():
        ranks = () if stage.is_uneven else stage.mesh.ranks
        slowest = max((found[rank] for rank in ranks), default=1.0)
        for rank in ranks:
            found[rank] = slowest
    return tuple(found)


def at_paces(chips: RankChips, paces: Sequence[float]) -> RankChips:
    """The same chips, each as fast as its rank is.

    Raises:
        ConfigError: a rate of a chip is not known.
    """
    pools: list[ChipPool] = []
    hardware = dict(chips.knowledge.hardware)
    for number, (pool, its) in enumerate(_nodes(chips.view, paces)):
        runs = [(pace, len(list(same))) for pace, same in groupby(its)]
        node = pool.node if len(runs) == 1 else pool.node or f"node {number}"
        for pace, count in runs:
            part = replace(pool, num_nodes=1, chips_per_node=count, node=node)
            if pace != 1:
                name = f"{pool.chip.name} at {1 / pace:.2g}"
                hardware[name] = _paced(chips.knowledge.hardware_of(part), pace)
                part = replace(part, chip=replace(part.chip, name=name))
            pools.append(part)
    knowledge = replace(chips.knowledge, hardware=hardware)
    basis = (*chips.basis, "what ranks were measured at in this run")
    return replace(chips, view=ClusterView(tuple(pools)), knowledge=knowledge, basis=basis)


def _nodes(view: ClusterView, paces: Sequence[float]) -> Iterable[tuple[ChipPool, Sequence[float]]]:
    """Each node of each pool, with the paces of its ranks."""
    first = 0
    for pool in view.pools:
        for _ in range(pool.num_nodes):
            yield pool, paces[first : first + pool.chips_per_node]
            first += pool.chips_per_node


def _paced(hardware: Hardware, pace: float) -> Hardware:
    software = hardware.software
    times = {name: getattr(software, name) * pace for name in ("step_s", "layer_s", "cast_layer_s")}
    slow = replace(software, **times)
    return replace(hardware, chip=Paced(hardware.chip, pace), software=slow)


def refuse_unknown(
    now: Resolved, busy_s: Sequence[float], problem: str, *, reads_wait: bool
) -> None:
    """``recovery.alarm: replan`` needs to know what ranks take, and how long they should.

    Args:
        busy_s: What was predicted of each rank.
        problem: Why nothing was.
        reads_wait: Some ranks compute on accelerators.

    Raises:
        ConfigError: it does not, or there is nothing to plan.
    """
    plan = now.plan
    precisions = sorted({stage.precision for _, _, stage in plan.stages()})
    if plan.world_size == 1:
        expected, hint = "off or warn with one rank", "There is nobody to give work to."
    elif reads_wait:
        expected = "off or warn where ranks compute on accelerators"
        hint = "The host does not see when one is done; `weft elastic move` takes a plan by hand."
    elif len(precisions) > 1:
        expected = f"off or warn where stages compute in {' and '.join(precisions)}"
        hint = "The planner plans for one precision: give all stages the same."
    elif plan.has_unlike_shares:
        expected = "off or warn where ranks of a stage have unlike shares"
        keys = ", ".join(["sample_shares", *(entry.shares_key for entry in UNLIKE)])
        hint = f"What each of them should take is not predicted: leave {keys} and state_shares out."
    elif not busy_s:
        expected, hint = (
            "off or warn where no time is predicted",
            f"{problem[:1].upper()}{problem[1:]}.",
        )
    else:
        return
    raise ConfigError("recovery.alarm", "replan", expected, hint)
