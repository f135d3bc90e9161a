"""Random clusters, and poorer ones beside each: what is planned for the richer is never slower.

A part of a cluster, a cluster with less memory or slower links, and a search with less effort all
bound the answer for the whole from above: chips may be left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from random import Random

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.models.llama.sizes import SIZES
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import Found, NoPlan, search

CHIPS = (
    "H100-SXM5-80GB",
    "A100-SXM4-80GB",
    "A100-SXM4-40GB",
    "V100-SXM2-32GB",
    "L40S",
    "A10",
    "T4",
    "RTX4090",
)
MODELS = "llama3.2-1b", "llama3.2-3b", "llama3-8b", "llama2-13b"
GBIT = 1, 1, 10, 25, 100, 400
AS_COMMANDS = Options(
    domains=True,
    mixed_recompute=True,
    in_flight=True,
    unlike_meshes=True,
    cuts_layers=True,
    divides_heads=True,
)
"""What commands leave open."""
SAME = 1e-6
"""Relative."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A cluster and a poorer one."""

    what: str
    """The poorer one has."""
    whole: Problem
    whole_s: float
    poorer_s: float

    @property
    def worse(self) -> float:
        """Part by which the richer one's step is longer; 0 where it is not."""
        ratio = 0.0 if self.poorer_s == inf else self.whole_s / self.poorer_s - 1
        return ratio if ratio > SAME else 0.0


def drawn(seed: int, options: Options, *, most_nodes: int = 8, most_kinds: int = 4) -> Problem:
    """A job on several kinds of chip."""
    random = Random(seed)
    kinds, pools = catalogue(), []
    for name in random.sample(CHIPS, random.randint(1, most_kinds)):
        nodes, per_node = random.randint(1, most_nodes), random.choice([1, 2, 4, 8])
        gbit = random.choice(GBIT)
        pools.append(
            ChipPool(
                chip=kinds[name], num_nodes=nodes, chips_per_node=per_node, network_gbit_s=gbit
            )
        )
    workload = Workload(
        spec=SIZES[random.choice(MODELS)],
        seq_len=random.choice([1024, 2048, 4096]),
        samples=random.choice([32, 64, 128, 200, 256]),
    )
    return Problem(workload, ClusterView(tuple(pools)), options=options)


def poorer(problem: Problem, random: Random) -> Iterator[tuple[str, Problem]]:
    """Without a kind of chip, or with fewer nodes of it; with less of something; each kind of
    poverty once."""
    pools = problem.cluster.pools
    number = random.randrange(len(pools))
    before, pool, after = pools[:number], pools[number], pools[number + 1 :]
    if len(pools) > 1:
        yield f"no {pool.chip.name}", problem.on(ClusterView((*before, *after)))
        alone = random.choice(pools)
        yield f"{alone.chip.name} alone", problem.on(ClusterView((alone,)))
    if pool.num_nodes > 1:
        fewer = replace(pool, num_nodes=random.randrange(1, pool.num_nodes))
        words = f"{fewer.num_nodes} of {pool.num_nodes} nodes of {pool.chip.name}"
        yield words, problem.on(ClusterView((*before, fewer, *after)))
    yield "0.8 of the memory", problem.with_memory(0.8)
    yield "half the network", problem.with_links(1.0, 0.5)
    options = replace(problem.options, effort=problem.options.effort // 10)
    yield "a tenth of the effort", replace(problem, options=options)


def compared(whole: Problem, seed: int) -> Iterator[Compared]:
    """A cluster with poorer ones of all sorts."""
    whole_s = _seconds(whole)
    for what, other in poorer(whole, Random(seed)):
        yield Compared(what=what, whole=whole, whole_s=whole_s, poorer_s=_seconds(other))


def _seconds(problem: Problem) -> float:
    found = _found(problem)
    if found is None:
        return inf
    step_s = found.best.time.step_s
    assert found.bound_s <= step_s * (1 + SAME), (
        f"{found.bound_s} s, and {found.best.name} {step_s}"
    )
    return step_s


def _found(problem: Problem) -> Found | None:
    try:
        return search(problem)
    except NoPlan:
        return None
