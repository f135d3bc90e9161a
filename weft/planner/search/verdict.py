"""What the search makes of one given plan: where it lies in the space, and what rules it out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import inf

from weft.cluster.view import ClusterView
from weft.cost.choice import ways_of_domains
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.problem import Problem
from weft.planner.search.again import MODES_APART
from weft.planner.search.choice import (
    INSIDE,
    LONG,
    SAMPLES,
    SPREAD,
    Apart,
    Line,
    Section,
    mesh_axes,
    samples_at_once,
    stage_layers,
    used_parts,
)
from weft.planner.search.costs import Costs
from weft.planner.search.found import Reason
from weft.planner.search.frames import Space
from weft.planner.search.meshes import Meshes, sizes
from weft.planner.search.route import Route
from weft.planner.search.splits import explore, too_slow
from weft.schedules.registry import SCHEDULES

_FINE = 1e-4
"""Relative; bounds are told that exactly."""
_AT_LAST = "only in the few plans it ends with"


_ONLY_WHERE = "only where nothing fits without, and then for all stages before some take it back"


class OutsideError(ValueError):
    """The search does not look there; says why."""


def _refuse_other_tiers(plan: Plan, problem: Problem) -> None:
    """It was looked for with one tier each for state, parameters and experts, beside the device."""
    for (state, params), _ in groupby((s.state_tier, s.param_tier) for _, _, s in plan.stages()):
        if state not in (problem.options.tiers[0], "device"):
            raise OutsideError(f"what only updates need is elsewhere {_ONLY_WHERE}")
        if params not in (problem.options.param_tiers[0], "device"):
            raise OutsideError(f"parameters are elsewhere {_ONLY_WHERE}")
    others = {stage.expert_tier for _, _, stage in plan.stages()} - {"device"}
    if others - {problem.options.expert_tiers[0]}:
        raise OutsideError("experts were kept elsewhere")


def verdict(plan: Plan, problem: Problem, *, best_s: float) -> Reason:
    """Why a plan that fits is not the one that was found, of which a step takes ``best_s``."""
    tiers = {stage.expert_tier for _, _, stage in plan.stages()} - {"device"}
    same = (each for each in problem.by_expert_tier() if {each.options.expert_tiers[0]} == tiers)
    problem = next(same, problem)
    costs = Costs(problem, len(plan.pipelines))
    try:
        if bool(plan.casts) != bool(problem.options.border):
            raise OutsideError("it casts borders as plan.border says")
        lines = lines_of(plan, problem.cluster)
        _refuse_other_tiers(plan, problem)
        for line in lines:
            _refuse_outside(line, costs)
    except OutsideError as outside:
        return Reason("shape", f"the search does not look there: {outside}")
    is_made = any(pipeline.lists for pipeline in plan.pipelines)
    made = "with its schedule's usual order, " if is_made else ""
    routes = [Route(costs, line) for line in lines]
    bound = max(map(least_seconds, routes)) * problem.knowledge.stretch(plan.world_size)
    if bound >= best_s:
        words = "no plan of these meshes, order, schedule and shares takes less than"
        return Reason("bound", f"ruled out by its bound: {made}{words} {bound:.4g} s")
    return Reason("slower", made + " and ".join(map(_best_split, routes)))


def least_seconds(route: Route) -> float:
    """The bound with which the search rules out a route, whatever its layers and levels of ZeRO."""
    low, high = 0.0, 1.0
    while too_slow(route, high):
        low, high = high, 2 * high
    while high - low > _FINE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if too_slow(route, middle) else (low, middle)
    return low


def lines_of(plan: Plan, cluster: ClusterView) -> list[Line]:
    """The plan as the search would write it down; the opposite of ``plan_of``.

    Raises:
        OutsideError: it cannot.
    """
    if plan.has_unlike_shares:
        raise OutsideError("it weighs meshes whose ranks have unlike parts apart, by other ways")
    lines = [_line(pipeline, cluster) for pipeline in plan.pipelines]
    pools = [section.pool for line in lines for section in line.sections]
    if len(set(pools)) < len(pools):
        raise OutsideError("all meshes on one pool of chips are alike there, and in one pipeline")
    levels = {section.zero for line in lines for section in line.sections}
    if len(lines) > 1 and (len(levels) > 1 or (3 in levels and not plan.domains)):
        words = "pipelines side by side have one level of ZeRO there, and without domains not 3"
        raise OutsideError(words)
    return _apart(plan, lines, cluster)


def _apart(plan: Plan, lines: list[Line], cluster: ClusterView) -> list[Line]:
    """The lines with the domains of the plan."""
    if not plan.domains:
        return lines
    apart: Apart = "nodes" if len(lines) == 1 else "pipelines"
    expected: dict[int, set[int]] = {}
    for p, _, stage in plan.stages():
        for rank in stage.mesh.ranks:
            number = cluster.node_of(rank) if apart == "nodes" else p
            expected.setdefault(number, set()).add(rank)
    if {*map(frozenset, plan.domains)} != {*map(frozenset, expected.values())}:
        raise OutsideError(f"domains of such a plan are those of its {apart} there")
    ways = ways_of_domains(plan)
    found = []
    for p, line in enumerate(lines):
        firsts = (stages[0] for stages in plan.pipelines[p].positions())
        sections = tuple(_with_ways(line, [ways[p, stage] for stage in firsts]))
        found.append(replace(line, sections=sections, apart=apart))
    return found


def _with_ways(line: Line, ways: Sequence[int]) -> Iterator[Section]:
    """Its sections, with ranks of a domain that hold the same on each mesh."""
    left = iter(ways)
    for section in line.sections:
        several = {next(left) for _ in range(section.meshes)}
        if len(several) > 1:
            raise OutsideError("all meshes on one pool of chips have equally many in a domain")
        yield section._replace(shard_ways=several.pop())


def _line(pipeline: PipelinePlan, cluster: ClusterView) -> Line:
    positions = pipeline.positions()
    meshes = [_section(pipeline.stages[stages[0]], cluster) for stages in positions]
    sections = tuple(first._replace(meshes=len(list(same))) for first, same in groupby(meshes))
    if any(stage.layers[0] % 1 for stage in pipeline.stages):
        raise OutsideError("it moves borders into layers only where a plan is among its best few")
    counts = [len(stage.blocks) for stage in pipeline.stages]
    layers = tuple(sum(counts[stage] for stage in stages) for stages in positions)
    chunks = {len(stages) for stages in positions}
    expected = stage_layers(pipeline.schedule, layers)
    if chunks != {SCHEDULES[pipeline.schedule].chunks} or expected != tuple(counts):
        raise OutsideError("stages of one mesh are two at most there, and share its layers evenly")
    line = Line(sections, pipeline.microbatch, pipeline.schedule, layers, pipeline.samples)
    return replace(line, in_flight=() if pipeline.lists else pipeline.in_flight)


def _section(stage: StagePlan, cluster: ClusterView) -> Section:
    """One mesh."""
    kinds = {pool.chip.name for pool, _ in cluster.by_pool(stage.mesh.ranks)}
    for is_so, words in (
        (stage.passes > 1, "it tries no passes"),
        (stage.pieces > 1, "it sends everything inside layers in one piece"),
        (stage.expert_pieces > 1, f"it tries pieces of tokens {_AT_LAST}"),
        (stage.head_ways > 1, f"it divides heads among neighbours {_AT_LAST}"),
        (stage.scores != "blocks", "it keeps no rows of scores"),
        (len(kinds) > 1, "it weighs meshes of unlike chips apart, by other ways"),
        (len(cluster.sites_of(stage.mesh.ranks)) > 1, "it keeps each mesh at one site"),
    ):
        if is_so:
            raise OutsideError(words)
    first = 0
    for number, pool in enumerate(cluster.pools):
        if stage.mesh.ranks[0] < first + pool.num_chips:
            every = ((name, stage.mesh.size(name)) for name in (*SPREAD, *LONG, *INSIDE))
            inner = tuple(axis for axis in every if axis[0] in INSIDE or axis[1] > 1)
            axes = mesh_axes(stage.mesh.size(SAMPLES), inner)
            return Section(number, axes, 1, stage.recompute, stage.zero)
        first += pool.num_chips
    raise AssertionError(f"rank {stage.mesh.ranks[0]} of {cluster.world_size}")


def _refuse_outside(line: Line, costs: Costs) -> None:
    options = costs.options
    modes = options.recompute + MODES_APART * options.mixed_recompute
    if line.schedule not in options.schedules and line.num_meshes > 1:
        raise OutsideError(f"the schedule was kept to {', '.join(options.schedules)}")
    if line.in_flight and not options.in_flight:
        raise OutsideError("it tries no more microbatches in flight than the schedule has")
    for section in line.sections:
        _refuse_more_parts(section, costs.problem.token_parts)
        if section.recompute not in modes:
            more = "; mixes are tried where a plan is among its best few" * options.mixed_recompute
            raise OutsideError(f"recomputation was kept to {', '.join(modes)}{more}")
        if not used_parts(costs.pools[section.pool], section):
            raise OutsideError(f"{section.num_chips} chips do not fill nodes evenly")
    if options.micros is not None:
        if samples_at_once(line.sections, line.micro) not in options.micros:
            few = " or ".join(map(str, options.micros))
            raise OutsideError(f"the rank with most samples of a micro-batch was kept to {few}")
    elif line.micro not in _micros(line, costs):
        raise OutsideError("a rank has a power of two of samples there, or all of its own")


def _refuse_more_parts(section: Section, parts: int) -> None:
    """Of each sample's tokens."""
    if any(size > parts for name, size in section.axes if name in LONG):
        words = f"at most {parts} parts" if parts > 1 else "one piece"
        raise OutsideError(f"tokens of each sample stay in {words}")


def _micros(line: Line, costs: Costs) -> Sequence[int]:
    """Microbatches that are tried with its chips."""
    if len(line.sections) == 1:
        ways = line.sections[0].ways
        return [ways * n for n in sizes(line.samples, ways)]
    space = Space(Meshes(costs), line.samples, line.samples)
    return space.micros([section.pool for section in line.sections])


def _best_split(route: Route) -> str:
    """What the search finds for the same pipeline with layers of its choice."""
    line, best = route.line, explore(route, inf).best
    assert best is not None, f"{line} fits, and its route does not"
    layers = best.line.layers
    split = "+".join(map(str, layers))
    if layers == line.layers or best.seconds >= route.seconds(line.layers):
        return f"it was weighed as it is, {split} layers"
    gain = 1 - best.seconds / route.seconds(line.layers)
    return f"with {split} layers its pipeline takes {gain:.1%} less, and was weighed with those"
