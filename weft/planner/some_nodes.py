"""The nodes of a cluster on which a step costs least, whatever its cost is: money, or time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, floor, inf, log10, prod
from typing import NamedTuple, Protocol

from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError
from weft.planner.problem import Problem
from weft.planner.search import Candidate, Found, NoPlan, Watch, fits, search
from weft.planner.search.costs import KnownCosts
from weft.planner.search.found import ENDED_EARLY
from weft.planner.search.least import Relaxed

MOST_CHOICES = 256
"""Of nodes, as far as pools are few: each is bounded, which takes a second for 10,000 chips."""


class Cost(Protocol):
    """What a step costs. It may not fall where the step takes longer."""

    def least(self, taken: ClusterView, step_s: float) -> float:
        """What a plan for all these nodes costs at least, whose step takes that long."""

    def of(self, taken: ClusterView, best: Candidate) -> float:
        """What this one costs."""


@dataclass(frozen=True, kw_only=True)
class SomeNodes:
    """Nodes that were chosen, and their plan."""

    asked: ClusterView
    """What there was to choose from."""
    nodes: tuple[int, ...]
    """Taken of each of its pools."""
    found: Found
    cost: float
    """Of a step."""
    least: float
    """Cost of a step that no plan beats, on any of the choices."""
    choices: int
    searched: int
    """Of these; the others cannot cost less, or be fast enough."""

    @property
    def cluster(self) -> ClusterView:
        """The nodes that were taken."""
        return _taken(self.asked, self.nodes)

    @property
    def choice(self) -> str:
        """Among how many, in words."""
        return f"{self.choices} choices of nodes ({self.searched} searched)"

    def taken(self) -> Iterator[str]:
        """By pool, in words."""
        for pool, nodes in zip(self.asked.pools, self.nodes, strict=True):
            kind = f"{pool.chips_per_node} x {pool.chip.name}"
            yield f"takes {nodes} of {pool.num_nodes} nodes of {kind}"

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints of the choice."""
        return {
            "choices": self.choices,
            "searched": self.searched,
            "nodes": [
                {"chip": pool.chip.name, "nodes": nodes}
                for pool, nodes in zip(self.asked.pools, self.nodes, strict=True)
            ],
        }


@dataclass(frozen=True, kw_only=True)
class ByCost:
    """What there is to say of nodes that were chosen, whatever the cost is."""

    chosen: SomeNodes
    tokens: int
    """Of a step."""

    @property
    def cluster(self) -> ClusterView:
        """The nodes that were taken."""
        return self.chosen.cluster


def some_nodes(
    problem: Problem, cost: Cost, within_s: float = inf, *, watch: Watch | None = None
) -> SomeNodes:
    """The choice of whole nodes whose best plan costs least a step of at most ``within_s``; the
    fastest of those that cost as much, as where chips cost nothing.

    Of each pool 0, 1, 2, 3, 4, 6, 8, 12, ... or all nodes may be taken; of large ones powers of 2,
    4, 8, ..., for ``MOST_CHOICES`` in all. The lower bound of a search says what a choice costs at
    least: the least first, until no other can cost less. A choice that holds the model only with
    state elsewhere is none, but all nodes are.

    Raises:
        ConfigError: no plan that was found is so fast.
        NoPlan: not even all nodes hold the model.
    """
    choices = list(_choices(problem.cluster))
    watch, known = watch or Watch(), KnownCosts()
    least = dict(_least(problem, cost, choices, within_s, watch, known))
    best: _Searched | None = None
    searched, enough, fastest_s = 0, (inf, inf), inf
    for nodes in sorted(least, key=least.__getitem__):
        if least[nodes] >= enough or (best and watch.is_over):
            break
        searched += 1
        tried = _searched(problem, cost, nodes, watch, known)
        if tried is not None:
            fastest_s = min(fastest_s, tried.step_s)
            if tried.step_s <= within_s and (tried.cost, tried.step_s) < enough:
                best, enough = tried, (tried.cost, tried.step_s)
    best = best or _of_all(problem, cost, within_s, fastest_s, watch)
    worth = sum(each < (best.cost, best.step_s) for each in least.values())
    is_cut_short = best.found.is_cut_short or searched < worth
    return SomeNodes(
        asked=problem.cluster,
        nodes=best.nodes,
        found=replace(best.found, is_cut_short=is_cut_short),
        cost=best.cost,
        least=min([(best.cost, best.step_s), *least.values()])[0],
        choices=len(choices),
        searched=searched,
    )


class _Searched(NamedTuple):
    """A choice with its best plan."""

    nodes: tuple[int, ...]
    found: Found
    step_s: float
    cost: float
    """Of a step."""


def _searched(
    problem: Problem, cost: Cost, nodes: tuple[int, ...], watch: Watch, known: KnownCosts
) -> _Searched | None:
    """None: these nodes do not hold the model, or only with state elsewhere."""
    taken = problem.on(_taken(problem.cluster, nodes))
    if not fits(taken):
        return None
    try:
        return _of_these(problem, cost, nodes, search(taken, watch=watch, known=known))
    except NoPlan:
        return None


def _of_all(
    problem: Problem, cost: Cost, within_s: float, fastest_s: float, watch: Watch
) -> _Searched:
    """All nodes, which may hold the model with state elsewhere; ``fastest_s``: of other choices."""
    every = tuple(pool.num_nodes for pool in problem.cluster.pools)
    best = _of_these(problem, cost, every, search(problem, watch=watch))
    if best.step_s > within_s:
        raise _too_slow(within_s, min(best.step_s, fastest_s), best.found)
    return best


def _of_these(problem: Problem, cost: Cost, nodes: tuple[int, ...], found: Found) -> _Searched:
    costs = cost.of(_taken(problem.cluster, nodes), found.best)
    return _Searched(nodes, found, found.best.time.step_s, costs)


def _least(
    problem: Problem,
    cost: Cost,
    choices: Sequence[tuple[int, ...]],
    within_s: float,
    watch: Watch,
    known: KnownCosts,
) -> Iterator[tuple[tuple[int, ...], tuple[float, float]]]:
    """What a step costs and takes at least, of choices that may hold the model and be fast
    enough."""
    for number, nodes in enumerate(choices):
        watch.tell(number, inf)
        taken = _taken(problem.cluster, nodes)
        least_s = Relaxed(problem.on(taken), known).least_s(range(len(taken.pools)))
        if least_s <= within_s and least_s < inf:
            yield nodes, (cost.least(taken, least_s), least_s)


def _too_slow(within_s: float, fastest_s: float, found: Found) -> ConfigError:
    digits = 10 ** (floor(log10(fastest_s)) - 2)
    enough_s = ceil(fastest_s / digits) * digits  # what is said here is not refused again
    expected = f"at least {enough_s:.3g}, the seconds of the fastest plan for these nodes"
    hint = ENDED_EARLY if found.is_cut_short else "More or faster nodes could take less."
    return ConfigError("--within", within_s, expected, hint)


def _choices(cluster: ClusterView) -> Iterator[tuple[int, ...]]:
    """Nodes of each pool, and of some pool one at least."""
    most = [pool.num_nodes for pool in cluster.pools]
    stairs: list[list[int]] = []
    for step in range(max(most).bit_length() + 1):
        stairs = [_stairs(number, step) for number in most]
        if prod(map(len, stairs)) <= MOST_CHOICES:
            break
    named = [pool.node for pool in cluster.pools]
    machines = [[n for n, node in enumerate(named) if node == name] for name in {*named} - {""}]

    def is_whole(nodes: Sequence[int]) -> bool:
        """Of a node that several pools are in, all is taken or nothing."""
        return all(len({nodes[n] for n in machine}) == 1 for machine in machines)

    return filter(is_whole, filter(any, product(*stairs)))


def _stairs(most: int, step: int) -> list[int]:
    """0, ``most``, and between them powers of ``2 ** step``, of 2 with halves more for 0."""
    powers = [1 << k for k in range(0, most.bit_length(), max(step, 1))]
    between = [] if step else [3 * power for power in powers]
    return sorted({0, most, *(number for number in powers + between if number < most)})


def _taken(cluster: ClusterView, nodes: tuple[int, ...]) -> ClusterView:
    pools = zip(cluster.pools, nodes, strict=True)
    return replace(
        cluster,
        pools=tuple(
            replace(pool, num_nodes=number)  # the first hosts are used
            for pool, number in pools
            if number
        ),
    )
