"""The search against every plan there is, one by one: does it lose the best?

``python -m benchmarks.every_plan [CASE ...] [--cut] [--json]``. Plans are listed by loops that know
nothing of the search: which kinds of chip go together in which order, meshes, microbatches, layers,
schedules, recomputation, ZeRO and shares. Only the cost model is shared. With ``--cut`` the list
goes beyond what the search promises: pools are cut in two, whose parts go different ways.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product
from math import inf, log2
from time import process_time
from typing import NamedTuple

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView, Site
from weft.cost.memory import memory_of_plan
from weft.models.llama.sizes import SIZES
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, Recompute, ScheduleName, StagePlan, ZeroLevel
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import search
from weft.precision.roles import Tier
from weft.simulate.step import Knowledge, time_of_plan

SCHEDULES: tuple[ScheduleName, ...] = (
    "1f1b", "zb-h1", "gpipe", "interleaved", "zb-v", "dualpipe-v"
)  # fmt: skip
MEMORY_PART = 0.92
KINDS = catalogue()
FAST, SLOW, OTHER = KINDS["H100-SXM5-80GB"], KINDS["A100-SXM4-80GB"], KINDS["L40S"]
WITHOUT_LIMIT = 10**12


def pool(chip: str, gib: float, chips: int, nodes: int = 1, gbit: float | None = None) -> ChipPool:
    """Nodes of a catalogue's chip with less memory than it has, whose hosts have enough."""
    small = replace(KINDS[chip], memory_gib=gib)
    many = {"num_nodes": nodes, "chips_per_node": chips}
    return ChipPool(chip=small, **many, network_gbit_s=gbit, host_gib=1e6)


def at_sites(gbit: float, *pools: ChipPool) -> tuple[ChipPool, ...]:
    """Each at a site of its own, 1 ms apart."""
    return tuple(
        replace(pool, site=Site(f"site {number}", pool.num_chips, gbit, 1e-3))
        for number, pool in enumerate(pools)
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A small cluster, and what it trains."""

    pools: tuple[ChipPool, ...]
    num_layers: int = 3
    samples: int = 4
    seq_len: int = 2048
    domains: bool = False
    """Plans whose ranks are domains by node, or by pipeline, are listed too; of all plans
    those with one schedule whose layers are whole."""

    tier: Tier = "device"
    """Where what only updates need is kept."""
    param_tier: Tier = "device"
    """Where parameters are, of plans that can bring them."""
    num_schedules: int = len(SCHEDULES)

    @property
    def schedules(self) -> tuple[ScheduleName, ...]:
        return SCHEDULES[: 1 if self.domains else self.num_schedules]

    @property
    def options(self) -> Options:
        """With which the search looks for the same."""
        usual = Options(
            effort=WITHOUT_LIMIT,
            few_parts=1,
            tiers=(self.tier,),
            param_tiers=(self.param_tier,),
            schedules=self.schedules,
        )
        return replace(usual, domains=True, max_split=1) if self.domains else usual

    @property
    def cluster(self) -> ClusterView:
        return ClusterView(self.pools)

    @property
    def workload(self) -> Workload:
        spec = replace(SIZES["llama2-7b"], num_layers=self.num_layers)
        return Workload(spec=spec, seq_len=self.seq_len, samples=self.samples)


H, A, L = FAST.name, SLOW.name, OTHER.name
CASES = {
    "one-line": Case(pools=(pool(H, 20, 1), pool(A, 24, 1), pool(L, 24, 1)), samples=2),
    "small-memory": Case(pools=(pool(H, 9.5, 1, 2), pool(A, 14.5, 1)), samples=4),
    "slow-links": Case(pools=(pool(H, 24, 1, 2, gbit=2), pool(A, 24, 1, gbit=2)), samples=4),
    "odd-layers": Case(pools=(pool(H, 26, 1), pool(A, 18, 2)), num_layers=5, samples=3),
    "side-by-side": Case(
        pools=(pool(H, 30, 1), pool(A, 30, 2)), num_layers=2, samples=8, seq_len=4096
    ),
    "short-side-by-side": Case(
        pools=(pool(H, 10, 1), pool(A, 11, 2)), num_layers=2, samples=8, seq_len=4096
    ),
    "two-and-two": Case(pools=(pool(H, 30, 2), pool(A, 30, 2)), num_layers=2, samples=4),
    "three-kinds": Case(
        pools=tuple(pool(kind, 30, 1, gbit=400) for kind in (H, A, L)),
        num_layers=2,
        samples=5,
        seq_len=4096,
    ),
    "two-nodes": Case(pools=(pool(H, 20, 2, 2, gbit=50),), seq_len=32768, domains=True),
    "short-nodes": Case(pools=(pool(H, 15, 2, 2, gbit=50),), seq_len=32768, domains=True),
    "two-pools": Case(
        pools=(pool(H, 20, 2), pool(H, 20, 2)), num_layers=1, seq_len=32768, domains=True
    ),
    "short-pools": Case(
        pools=(pool(H, 20, 2), pool(H, 20, 2)), num_layers=2, seq_len=32768, domains=True
    ),
    "on-disk": Case(pools=(pool(H, 5, 2), pool(A, 6, 1)), samples=2, tier="disk"),
    "params-on-hosts": Case(
        pools=(pool(H, 5, 2), pool(A, 6, 1)), samples=2, tier="host", param_tier="host"
    ),
    "two-sites": Case(
        pools=at_sites(100, pool(H, 24, 1, 2, gbit=400), pool(H, 24, 1)), num_layers=2, samples=3
    ),
    "long-at-two-sites": Case(
        pools=at_sites(20, pool(H, 40, 1), pool(H, 40, 1)), num_layers=1, seq_len=32768
    ),
    "six-chips": Case(pools=(pool(H, 16, 2), pool(A, 12, 1, 4)), samples=5),
}
"""The last is listed by the benchmark alone."""


class Section(NamedTuple):
    """Meshes of one kind of chip, next to each other in a pipeline."""

    tp: int
    dp: int
    meshes: int
    nodes: ChipPool
    """That they fill."""


class Timed(NamedTuple):
    """A pipeline that fits, beside so many others."""

    seconds: float
    num_chips: int
    zero: frozenset[int]
    apart: bool
    """It is a domain."""
    plan: Plan
    used: ClusterView


@dataclass(slots=True)
class Best:
    """Of the plans so far."""

    seconds: float = inf
    num_pipelines: int = 0
    plan: Plan | None = None
    used: ClusterView | None = None
    timed: int = 0
    """Pipelines."""
    plans: int = 0
    """That they make, alone and side by side; every one is compared."""


def brute_force(case: Case, best: Best | None = None) -> Best:
    """The fastest of all plans."""
    best = Best() if best is None else best
    kinds = range(len(case.pools))
    for number in range(1, len(case.pools) + 1):
        for chosen in combinations(kinds, number):
            for groups in partitions(chosen):
                if len(groups) <= case.samples:
                    _side_by_side(case, groups, best)
    return best


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to put things in heaps."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for number, heap in enumerate(rest):
            yield [*rest[:number], [items[0], *heap], *rest[number + 1 :]]


def _side_by_side(case: Case, groups: Sequence[Sequence[int]], best: Best) -> None:
    """Every share of the samples, every pipeline of each group beside every one of the others."""
    for shares in _shares(case.samples, len(groups)):
        found = [
            list(_pipelines(case, group, share, [g for g in groups if g is not group], best))
            for group, share in zip(groups, shares, strict=True)
        ]
        best.plans += _count(found)
        alone = len(groups) == 1
        for level, apart in product(range(4), (False, True)):
            _compare([_fastest(timed, level, apart, alone=alone) for timed in found], best)


def _shares(samples: int, groups: int) -> Iterator[tuple[int, ...]]:
    for shares in product(range(1, samples + 1), repeat=groups):
        if sum(shares) == samples:
            yield shares


def _count(found: Sequence[Sequence[Timed]]) -> int:
    """Plans: pipelines side by side have one level of ZeRO, and are domains or not."""
    if len(found) == 1:
        return len(found[0])
    total = 0
    for level, apart in product(range(4), (False, True)):
        number = 1
        for timed in found:
            number *= sum(each.zero == {level} and each.apart == apart for each in timed)
        total += number
    return total


def _fastest(timed: Sequence[Timed], level: int, apart: bool, *, alone: bool) -> list[Timed]:
    """Of as many chips the fastest: no other can be part of a faster plan."""
    found: dict[int, Timed] = {}
    for each in timed:
        known = found.get(each.num_chips)
        alike = each.zero == {level} and each.apart == apart
        if (alone or alike) and (known is None or each.seconds < known.seconds):
            found[each.num_chips] = each
    return list(found.values())


def _compare(found: Sequence[Sequence[Timed]], best: Best) -> None:
    straggle = Knowledge().software.straggle
    for chosen in product(*found):
        chips = sum(each.num_chips for each in chosen)
        late = 1 + straggle * log2(chips)
        seconds = late * max(each.seconds for each in chosen)
        if seconds >= best.seconds:
            continue
        plan, used = joined([(each.plan, each.used) for each in chosen], apart=chosen[0].apart)
        seconds += late * Knowledge().totals_s(used)
        if seconds < best.seconds:
            best.seconds, best.num_pipelines = seconds, len(chosen)
            best.plan, best.used = plan, used


def joined(
    parts: Sequence[tuple[Plan, ClusterView]], *, apart: bool = False
) -> tuple[Plan, ClusterView]:
    """Plans of one pipeline each, side by side on ranks one after another; ``apart``: each is a
    domain."""
    pipelines: list[PipelinePlan] = []
    pools: list[ChipPool] = []
    domains = []
    first = 0
    for plan, used in parts:
        pipelines.append(_moved(plan.pipelines[0], first))
        pools += used.pools
        domains.append(tuple(range(first, first + used.world_size)))
        first += used.world_size
    plan = replace(parts[0][0], pipelines=tuple(pipelines))
    return replace(plan, domains=tuple(domains)) if apart else plan, ClusterView(tuple(pools))


def _moved(pipeline: PipelinePlan, first: int) -> PipelinePlan:
    stages = []
    for stage in pipeline.stages:
        ranks = tuple(rank + first for rank in stage.mesh.ranks)
        stages.append(replace(stage, mesh=replace(stage.mesh, ranks=ranks)))
    return replace(pipeline, stages=tuple(stages))


def _pipelines(
    case: Case, group: Sequence[int], share: int, others: Sequence[Sequence[int]], best: Best
) -> Iterator[Timed]:
    """Those of some pools that fit, timed beside one on each group of others."""
    pools = [case.pools[number] for number in group]
    spec = case.workload.spec
    beside = [case.pools[other[0]] for other in others]
    shared = bool(beside)
    for apart in (False, True) if case.domains and shared else (False,):
        every = every_pipeline(
            pools,
            spec.num_layers,
            share,
            shared=shared,
            apart=apart,
            schedules=case.schedules,
        )
        for plan, used in every if shared or not case.domains else with_nodes(every):
            if case.domains and any(stage.mesh.model_axes for _, _, stage in plan.stages()):
                continue
            best.timed += 1
            seconds = _alone(case, plan, used, beside, apart=apart)
            if seconds is not None:
                levels = frozenset(stage.zero for stage in plan.pipelines[0].stages)
                yield Timed(seconds, used.world_size, levels, apart, plan, used)


def with_nodes(
    plans: Iterator[tuple[Plan, ClusterView]],
) -> Iterator[tuple[Plan, ClusterView]]:
    """These, and the same with each node a domain, where every mesh fills nodes or is on one."""
    for plan, used in plans:
        yield plan, used
        nodes: dict[int, list[int]] = {}
        for rank in range(used.world_size):
            nodes.setdefault(used.node_of(rank), []).append(rank)
        held = [
            {len({*stage.mesh.ranks} & {*node}) for node in nodes.values()} - {0}
            for _, _, stage in plan.stages()
        ]
        sizes = [{*map(len, nodes.values())}, *held]
        if len(nodes) > 1 and all(len(each) == 1 for each in sizes):
            yield replace(plan, domains=tuple(map(tuple, nodes.values()))), used


def _alone(
    case: Case, plan: Plan, used: ClusterView, beside: Sequence[ChipPool], *, apart: bool
) -> float | None:
    """Seconds of a pipeline, with the smallest pipelines there are beside it, without the sum of
    totals over all; None: no room."""
    spec, seq_len = case.workload.spec, case.seq_len
    others = [_smallest(spec, part) for part in beside]
    whole, cluster = joined([(plan, used), *others], apart=apart)
    tiers = {"state_tier": case.tier, "param_tier": case.param_tier}
    whole = whole.each(lambda stage: replace(stage, **tiers))
    first = whole.pipelines[0].stages
    if case.param_tier != "device" and not all(
        s.mesh.sample_ways == 1 or s.zero == 3 for s in first
    ):
        return None
    if not fits(whole, spec, cluster, seq_len, ranks=used.world_size):
        return None
    time = time_of_plan(whole, spec, cluster, seq_len=seq_len)
    return time.timelines[0].step_s + time.once_s[0] - Knowledge().totals_s(cluster)


def _smallest(spec: ModelSpec, part: ChipPool) -> tuple[Plan, ClusterView]:
    """One chip, one sample."""
    one = replace(part, num_nodes=1, chips_per_node=1, node="")
    stage = StagePlan(
        mesh=Mesh.of(range(1), dp=1),
        layers=(0, spec.num_layers),
        device="cuda",
        precision="bf16",
    )
    pipeline = PipelinePlan(stages=(stage,), samples=1, microbatch=1)
    return Plan(num_layers=spec.num_layers, pipelines=(pipeline,)), ClusterView((one,))


def fits(plan: Plan, spec: ModelSpec, used: ClusterView, seq_len: int, ranks: int) -> bool:
    """Every one of the first so many ranks has room."""
    memory = memory_of_plan(plan, spec, seq_len)
    firsts = {stage.mesh.ranks[0] for _, _, stage in plan.stages()}
    return all(
        memory[rank].total <= used.pool_of(rank).chip.memory_gib * 2**30 * MEMORY_PART
        for rank in firsts
        if rank < ranks
    )


def every_pipeline(
    pools: Sequence[ChipPool],
    num_layers: int,
    samples: int,
    *,
    shared: bool,
    apart: bool = False,
    schedules: Sequence[ScheduleName] = SCHEDULES,
) -> Iterator[tuple[Plan, ClusterView]]:
    """One pipeline through all these kinds, in any order.

    ``shared``: others hold the same parameters, so that ZeRO has something to share out;
    ``apart``: they are other domains.
    """
    choices = [list(every_section(part, samples)) for part in pools]
    ways = {section.dp for sections in choices for section in sections}
    for chosen in product(*choices):
        ranks_samples = ways if len(pools) > 1 else {chosen[0].dp}
        for micro in range(1, samples + 1):
            if _worth_having(chosen, micro, ranks_samples, is_all=micro == samples):
                for order in permutations(chosen):
                    levels = list(_levels(order, shared=shared, apart=apart))
                    yield from every_way(order, micro, samples, num_layers, levels, schedules)


def _worth_having(sections: Sequence[Section], micro: int, ways: set[int], *, is_all: bool) -> bool:
    """Some rank has a power of two of samples, or an equal part of all (``is_all``), and with no
    rank less all would have more."""
    each = {micro // dp for dp in ways if micro % dp == 0}
    if not each & ({*each} if is_all else {1, 2, 4, 8, 16}):
        return False
    for _, dp, _, _ in sections:
        if dp > micro or (dp > 1 and -(-micro // dp) == -(-micro // (dp - 1))):
            return False
    return True


def every_section(part: ChipPool, samples: int) -> Iterator[Section]:
    """As many chips on each of the fewest nodes."""
    total, node = part.num_chips, part.chips_per_node
    for tp, dp in product(range(1, node + 1), range(1, samples + 1)):
        for meshes in range(1, total // (tp * dp) + 1):
            chips = tp * dp * meshes
            if node % tp or 32 % tp:
                continue
            for nodes in range(1, part.num_nodes + 1):
                if chips <= nodes * node and chips % (nodes * tp) == 0:
                    used = replace(part, num_nodes=nodes, chips_per_node=chips // nodes)
                    yield Section(tp, dp, meshes, used)
                    break


def every_way(
    sections: Sequence[Section],
    micro: int,
    samples: int,
    num_layers: int,
    levels: Sequence[tuple[ZeroLevel, ...]],
    schedules: Sequence[ScheduleName],
) -> Iterator[tuple[Plan, ClusterView]]:
    """The schedules, recomputation, ZeRO and layers of a pipeline."""
    used = ClusterView(tuple(section.nodes for section in sections))
    many = sum(section.meshes for section in sections)
    usual: tuple[ScheduleName, ...] = ("1f1b",)
    for recompute, zero in product(product(("off", "full"), repeat=len(sections)), levels):
        shells = list(_meshes(sections, recompute, zero))
        for schedule, split in product(
            schedules if many > 1 else usual, every_split(many, num_layers)
        ):
            pipeline = PipelinePlan(
                stages=_stages(shells, split, schedule),
                samples=samples,
                microbatch=micro,
                schedule=schedule,
            )
            yield Plan(num_layers=num_layers, pipelines=(pipeline,)), used


def _levels(
    sections: Sequence[Section], *, shared: bool, apart: bool
) -> Iterator[tuple[ZeroLevel, ...]]:
    """Of each section; pipelines side by side have one level, the third as domains alone."""
    several: tuple[ZeroLevel, ...] = (0, 1, 2, 3)
    if shared:
        yield from ((level,) * len(sections) for level in several[: 4 if apart else 3])
        return
    alone: tuple[ZeroLevel, ...] = (0,)
    yield from product(*(several if section.dp > 1 else alone for section in sections))


def _meshes(
    sections: Sequence[Section], recompute: Sequence[Recompute], zero: Sequence[ZeroLevel]
) -> Iterator[StagePlan]:
    """One stage for each mesh, still without its layers."""
    first = 0
    for section, keeps, level in zip(sections, recompute, zero, strict=True):
        for _ in range(section.meshes):
            ranks = range(first, first + section.dp * section.tp)
            mesh = Mesh.of(ranks, dp=section.dp, tp=section.tp)
            first = ranks.stop
            yield StagePlan(
                mesh=mesh,
                layers=(0, 0),
                device="cuda",
                precision="bf16",
                recompute=keeps,
                zero=level,
            )


def every_split(meshes: int, layers: int) -> Iterator[tuple[int, ...]]:
    """Only the ends of a pipeline may have no layer of their own."""
    for split in product(range(layers + 1), repeat=meshes):
        if sum(split) == layers and all(split[1:-1]):
            yield split


def _stages(
    shells: Sequence[StagePlan], split: tuple[int, ...], schedule: str
) -> tuple[StagePlan, ...]:
    there = list(range(len(shells)))
    parts = [((n + 1) // 2, n // 2) for n in split]
    if schedule in ("zb-v", "dualpipe-v"):
        order = [(m, parts[m][0]) for m in there] + [(m, parts[m][1]) for m in reversed(there)]
    elif schedule == "interleaved":
        order = [(m, parts[m][chunk]) for chunk in (0, 1) for m in there]
    else:
        order = list(zip(there, split, strict=True))
    stages, layer = [], 0
    for mesh, count in order:
        stages.append(replace(shells[mesh], layers=(layer, layer + count)))
        layer += count
    return tuple(stages)


def cuts(case: Case) -> Iterator[Case]:
    """The case with one of its pools in two parts."""
    for number, part in enumerate(case.pools):
        for first in range(1, part.num_chips // 2 + 1):
            halves = _cut(part, first, f"cut-{number}")
            if halves:
                pools = (*case.pools[:number], *halves, *case.pools[number + 1 :])
                yield replace(case, pools=pools)


def _cut(part: ChipPool, first: int, name: str) -> tuple[ChipPool, ...]:
    if part.num_nodes == 1:
        return tuple(
            replace(part, chips_per_node=chips, node=part.node or name)
            for chips in (first, part.chips_per_node - first)
        )
    if first % part.chips_per_node:
        return ()
    nodes = first // part.chips_per_node
    return tuple(replace(part, num_nodes=n) for n in (nodes, part.num_nodes - nodes))


def measure(name: str, *, cut: bool) -> dict[str, object]:
    """A case's row."""
    case = CASES[name]
    begin = process_time()
    best = brute_force(case)
    inside = best.seconds
    for other in cuts(case) if cut else ():
        brute_force(other, best)
    end = process_time()
    found = search(Problem(case.workload, case.cluster, options=case.options))
    step_s = found.best.time.step_s
    return {
        "name": name,
        "ours": step_s,
        "theirs": {"brute force": best.seconds},
        "ratio": best.seconds / step_s,
        "inside": inside / step_s,
        "unit": "s",
        "spread": None,
        "timed": best.timed,
        "plans": best.plans,
        "pipelines": best.num_pipelines,
        "found": found.best.name,
        "cpu_s": {"brute force": end - begin, "search": process_time() - end},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each case, or JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.every_plan", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--cut", action="store_true", help="pools in two parts too")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    asked = parser.parse_args(arguments)
    rows = []
    for name in asked.cases or CASES:
        rows.append(measure(name, cut=asked.cut))
        if not asked.json:
            print(rows[-1], flush=True)
    if asked.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
