"""Pipelines as the search sees them, at random but seeded: what its tests are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from random import Random

from weft.cluster.cluster import Chip, catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.models.llama.sizes import SIZES
from weft.plan.plan import Precision, ScheduleName
from weft.planner.problem import Problem, Workload
from weft.planner.search.choice import Line, Section, plan_of, used_cluster
from weft.planner.search.costs import Costs
from weft.planner.search.route import Route
from weft.planner.search.splits import filled
from weft.simulate.step import time_of_plan

SCHEDULES: tuple[ScheduleName, ...] = (
    "1f1b",
    "zb-h1",
    "gpipe",
    "interleaved",
    "zb-v",
    "dualpipe-v",
)
H100 = catalogue()["H100-SXM5-80GB"]
A100 = replace(catalogue()["A100-SXM4-80GB"], memory_gib=24)
"""With less memory, so that a budget is not mistaken for another's."""
CORE = Chip(
    name="core",
    vendor="CPU",
    memory_gib=8,
    peak_tflops={"fp32": 0.1, "bf16": 0.1},
    measured_tflops={},
    memory_gb_s=10,
    link="host memory",
    link_gb_s=3,
    network_gbit_s=10,
    confidence="none",
    notes="",
)
"""One core of a processor."""
SLOW_GBIT = 2.0
"""A network so slow that pipelines wait for it."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A pipeline, and what it runs on."""

    costs: Costs
    line: Line

    @property
    def route(self) -> Route:
        """As the search makes it."""
        return Route(self.costs, self.line)

    def step_s(self) -> float:
        """Of the whole step, as users see it, but for its totals and the lateness of many ranks."""
        problem = self.costs.problem
        plan, workload = plan_of([self.line], problem), problem.workload
        used = used_cluster([self.line], problem.cluster)
        time = time_of_plan(
            plan, workload.spec, used, seq_len=workload.seq_len, knowledge=problem.knowledge
        )
        return time.step_s / time.stretch - problem.knowledge.totals_s(used)


def drawn(
    random: Random,
    *,
    most_meshes: int = 4,
    most_micros: int = 12,
    chips: tuple[Chip, ...] = (H100, A100),
    precision: Precision = "bf16",
) -> Drawn:
    """A pipeline of up to two kinds of chip, of any schedule and split."""
    chosen = random.sample(chips, random.choice([1, len(chips)]))
    meshes = [random.randint(1, max(1, most_meshes // len(chosen))) for _ in chosen]
    pools, sections = [], []
    for number, (chip, many) in enumerate(zip(chosen, meshes, strict=True)):
        tp, dp = random.choice([1, 1, 2]), random.choice([1, 1, 2, 3])
        slow = random.choice([None, None, SLOW_GBIT])
        uneven = [2 * tp] * (many == 1 and dp == 3)  # one chip of the second node is left out
        per_node = random.choice([tp, tp * dp, tp * dp * many, *uneven])
        nodes = -(-tp * dp * many // per_node)
        pools.append(
            ChipPool(chip=chip, num_nodes=nodes, chips_per_node=per_node, network_gbit_s=slow)
        )
        recompute = random.choice(["off", "full"])
        zero = random.choice([0, 1, 2, 3]) if dp > 1 else 0
        sections.append(Section(number, (("dp", dp), ("tp", tp)), many, recompute, zero))
    total = sum(meshes)
    num_layers = random.randint(max(total, 2), 3 * total + 2)
    micro = max(section.ways for section in sections) * random.randint(1, 3)
    samples = micro * random.randint(1, most_micros) + random.randint(0, micro - 1)
    spec = replace(SIZES["llama2-7b"], num_layers=num_layers)
    workload = Workload(spec=spec, seq_len=512, samples=samples, precision=precision)
    costs = Costs(Problem(workload, ClusterView(tuple(pools))), 1)
    schedule = random.choice(SCHEDULES) if total > 1 else "1f1b"
    made = Drawn(costs=costs, line=Line(tuple(sections), micro, schedule, (), samples))
    layers = split_at_random(random, num_layers, made.route.least)
    return replace(made, line=replace(made.line, layers=layers))


def split_at_random(random: Random, total: int, least: Sequence[int]) -> tuple[int, ...]:
    """Any split in which every mesh has at least so many layers, each as likely."""
    free = total - sum(least)
    cuts = sorted(random.randint(0, free) for _ in least[1:])
    parts = [b - a for a, b in pairwise([0, *cuts, free])]
    return tuple(low + more for low, more in zip(least, parts, strict=True))


def long_drawn(random: Random, schedule: ScheduleName) -> Drawn:
    """A pipeline with many more microbatches than meshes, over borders of any rate."""
    meshes = [random.randint(2, 5) for _ in range(random.randint(1, 2))]
    pools, sections = [], []
    for number, (chip, many) in enumerate(zip((H100, A100), meshes, strict=False)):
        gbit = random.choice([None, SLOW_GBIT, 10 * SLOW_GBIT])
        pools.append(ChipPool(chip=chip, num_nodes=many, chips_per_node=1, network_gbit_s=gbit))
        axes = (("dp", 1), ("tp", 1))
        sections.append(Section(number, axes, many, random.choice(["off", "full"])))
    total = sum(meshes)
    spec = replace(SIZES["llama2-7b"], num_layers=random.randint(total, 4 * total))
    samples = total * random.randint(20, 25) + random.randint(0, total)
    workload = Workload(spec=spec, seq_len=512, samples=samples)
    costs = Costs(Problem(workload, ClusterView(tuple(pools))), 1)
    made = Drawn(costs=costs, line=Line(tuple(sections), 1, schedule, (), samples))
    if random.random() < 0.5:
        layers = split_at_random(random, spec.num_layers, made.route.least)
    else:
        roomy = Costs(costs.problem.with_memory(inf), 1)
        layers = filled(Route(roomy, made.line), spec.num_layers)
    return replace(made, line=replace(made.line, layers=layers))
