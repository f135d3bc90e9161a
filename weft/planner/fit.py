"""Does a plan fit its chips' memory, where not, and the smallest change that would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil, inf

from weft.cluster.cluster import HOST, Chip
from weft.cluster.view import ChipPool
from weft.cost.activations import stage_away
from weft.cost.choice import choice_of
from weft.cost.memory import Memory, experts_elsewhere
from weft.models.registry import shape_of
from weft.plan.plan import PipelinePlan, Plan, StagePlan, ZeroLevel
from weft.planner.problem import Problem
from weft.recompute.asked import computed_again, kept_off_host
from weft.schedules.known import Pattern, held_at_peak

CHECKPOINTING = "activation checkpointing"
"""What most call it that layers are computed again in backward, from what each was given."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A mesh whose ranks need more than their chips have, or their hosts."""

    key: str
    """Where in the plan: its first stage."""
    chip: Chip
    need_gib: float
    room_gib: float
    on_host: bool = False
    """Of a host's memory, for each of its chips."""

    @property
    def whose(self) -> str:
        """Memory, in words."""
        return f"{'the host of ' * self.on_host}a {self.chip.name}"

    @property
    def short_gib(self) -> float:
        return self.need_gib - self.room_gib


def shortages(plan: Plan, problem: Problem) -> list[Shortage]:
    """Where memory is short, the worst first."""
    memory = problem.memory(plan)
    found = list(short_hosts(plan, problem))
    for p, pipeline in enumerate(plan.pipelines):
        for stages in pipeline.positions():
            rank = problem.fullest(pipeline.stages[stages[0]], memory)
            chip, need = problem.cluster.pool_of(rank).chip, memory[rank].total
            room = problem.options.memory_part * chip.memory_gib
            if need > room * 2**30:
                key = f"pipelines[{p}].stages[{stages[0]}]"
                found.append(Shortage(key, chip, need / 2**30, room))
    return sorted(found, key=lambda short: short.room_gib - short.need_gib)


def short_hosts(plan: Plan, problem: Problem) -> Iterator[Shortage]:
    """Where something is kept in the memory of hosts, which their chips share alike."""
    kept = kept_by_hosts_of(plan, problem)
    for p, s, stage in plan.stages() if kept else ():
        for pool, ranks in problem.cluster.by_pool(stage.mesh.ranks):
            need = max(kept.get(rank, 0.0) for rank in ranks) / 2**30
            room = _of_host_gib(pool, problem)
            if need > room:
                key = f"pipelines[{p}].stages[{s}]"
                yield Shortage(key, pool.chip, need, room, on_host=True)


def _of_host_gib(pool: ChipPool, problem: Problem) -> float:
    """Of a host's memory, for each of its chips."""
    return problem.options.memory_part * (pool.host_gib or 0.0) / pool.chips_per_node


def with_room_on_hosts(plan: Plan, number: int, problem: Problem) -> tuple[float, ...]:
    """By position of a pipeline, microbatches of its stages for which hosts have room, where they
    keep activations of those in flight."""
    kept, pipeline = kept_by_hosts_of(plan, problem), plan.pipelines[number]
    work, found = problem.workload, []
    held_by = held_at_peak(Pattern.of(pipeline))
    for stages, held in zip(pipeline.positions(), held_by, strict=True):
        first = pipeline.stages[stages[0]]
        choices = [choice_of(pipeline, stage, work.seq_len) for stage in stages]
        shape = shape_of(work.spec)
        away = max(each.passes * stage_away(shape, each.work, "host") for each in choices)
        left = min(
            _of_host_gib(pool, problem) * 2**30 - max(kept.get(rank, 0.0) for rank in ranks)
            for pool, ranks in problem.cluster.by_pool(first.mesh.ranks)
        )
        found.append(sum(held) + left // away if away else inf)
    return tuple(found)


def kept_by_hosts_of(plan: Plan, problem: Problem) -> Mapping[int, float]:
    """Bytes by rank, of those that keep something in the memory of their hosts."""
    work = problem.workload
    experts = experts_elsewhere(plan, work.spec, work.seq_len, work.training, "host")
    rest = kept_on_hosts(plan, problem.memory)
    return {rank: experts.get(rank, 0.0) + rest.get(rank, 0.0) for rank in {*experts, *rest}}


def kept_on_hosts(
    plan: Plan, memory_of: Callable[[Plan], Mapping[int, Memory]]
) -> Mapping[int, float]:
    """Of what is not experts: bytes by rank, of those that keep something there."""
    apart = [stage.mesh for _, _, stage in plan.stages() if stage != _without_host(stage)]
    if not apart:
        return {}
    here, usual = memory_of(plan), memory_of(plan.each(_without_host))

    def away(rank: int) -> float:
        found, whole = here[rank], usual[rank]
        state = whole.state - found.state
        return state + whole.activations - found.activations

    return {rank: away(rank) for mesh in apart for rank in mesh.ranks}


def _without_host(stage: StagePlan) -> StagePlan:
    tier = "device" if stage.state_tier == "host" else stage.state_tier
    modes = kept_off_host(stage.recompute)
    near = "device" if stage.param_tier == "host" else stage.param_tier
    return replace(stage, state_tier=tier, param_tier=near, recompute=modes)


def smallest_change(plan: Plan, problem: Problem) -> str:
    """What would make a plan fit, as an order; each is tried, and the first that does is named."""
    for words, changed in chain(changes(plan), _elsewhere(plan, problem)):
        if changed != plan and not shortages(changed, problem):
            return f"{words}."
    worst = shortages(plan, problem)[0]
    need = ceil(worst.need_gib / problem.options.memory_part)
    if worst.on_host and any(stage.expert_tier == "host" for _, _, stage in plan.stages()):
        return f"Keep experts on disk (expert_tier), or say host_gib: {need} for each chip there."
    if worst.on_host:
        return f"Keep less of it there, or say host_gib: {need} for each chip there."
    return f"Nothing else alone would do: take chips of {need} GiB there, or more of them."


def changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """What takes less memory, as an order, small to large: what costs no time comes first."""
    usual = (replace(each, in_flight=(), lists=()) for each in plan.pipelines)
    words = "Leave out what is in flight beyond the schedule's own (lists, in_flight)"
    yield words, replace(plan, pipelines=tuple(usual))
    yield "Divide the optimizer's state (zero: 1)", plan.each(_zero(1))
    yield "Halve the micro-batches (batch.micro)", _halved(plan)
    yield "Divide gradients too (zero: 2)", plan.each(_zero(2))
    again = plan.each(lambda stage: replace(stage, recompute="full"))
    words = f"Compute layers again in backward ({CHECKPOINTING}, recompute: full)"
    yield words, again
    yield f"{words} and divide the optimizer's state (zero: 1)", again.each(_zero(1))
    yield f"{words} and divide gradients (zero: 2)", again.each(_zero(2))
    if len(plan.pipelines) == 1:
        yield "Divide parameters too (zero: 3)", plan.each(_zero(3))
        yield f"{words} and divide parameters (zero: 3)", again.each(_zero(3))
    yield "Keep activations in the memory of hosts (recompute: offload)", plan.each(_offloading)


def _elsewhere(plan: Plan, problem: Problem) -> Iterator[tuple[str, Plan]]:
    """Likewise, what a problem lets wait in the memory of hosts; parameters where no two ranks
    bring the same."""
    if any(stage.device == HOST for _, _, stage in plan.stages()):
        return
    away = plan.each(lambda stage: replace(stage, state_tier="host"))
    if "host" in problem.options.tiers:
        yield "Keep what only updates need in the memory of hosts (state_tier: host)", away
    if "host" in problem.options.param_tiers and len(plan.pipelines) == 1:
        both = away.each(_zero(3)).each(lambda stage: replace(stage, param_tier="host"))
        words = "what only updates need and parameters in the memory of hosts"
        yield f"Keep {words} (state_tier: host, param_tier: host)", both


def without_recompute(plan: Plan) -> Plan:
    """The plan with all activations kept."""
    return plan.each(lambda stage: replace(stage, recompute="off"))


def _zero(level: ZeroLevel) -> Callable[[StagePlan], StagePlan]:
    """At least that level where ranks can share."""

    def raised(stage: StagePlan) -> StagePlan:
        if stage.mesh.sample_ways == 1 or stage.zero >= level:
            return stage
        return replace(stage, zero=level)

    return raised


def _offloading(stage: StagePlan) -> StagePlan:
    """Beside what is computed again, but for whole layers, which keep nothing to offload."""
    if stage.device == HOST:
        return stage
    again = computed_again(stage.recompute)
    beside = "" if again == "off" or "full" in again else f"{again}+"
    return replace(stage, recompute=f"{beside}offload")


def _halved(plan: Plan) -> Plan:
    """Half the samples in each microbatch, as long as every rank and pass has one."""

    def half(pipeline: PipelinePlan) -> PipelinePlan:
        if any(stage.is_uneven for stage in pipeline.stages):
            return pipeline
        least = max(stage.mesh.sample_ways * stage.passes for stage in pipeline.stages)
        # Lists are of so many microbatches as there were.
        return replace(pipeline, microbatch=max(pipeline.microbatch // 2, least), lists=())

    return replace(plan, pipelines=tuple(half(pipeline) for pipeline in plan.pipelines))
