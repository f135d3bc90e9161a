"""The nodes of a cluster on which a step costs least: hired for as long as it takes, all of them.

More chips make a step faster and rarely cheaper, for what they wait for each other is paid as well:
without a limit of time few nodes are the answer, of the kind that computes most for its price.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError
from weft.planner.problem import Problem
from weft.planner.search import Found, NoPlan, Progress, search
from weft.planner.search.least import Relaxed


@dataclass(frozen=True, kw_only=True)
class Cheapest:
    """Nodes that were chosen, and what a step on them costs."""

    asked: ClusterView
    """What there was to choose from."""
    nodes: tuple[int, ...]
    """Taken of each of its pools."""
    step_s: float
    tokens: int
    """Of a step."""
    least: float
    """Price of a step that no plan beats, on any of the choices."""
    choices: int
    searched: int
    """Of these; the others cannot be cheaper, or fast enough."""

    @property
    def cluster(self) -> ClusterView:
        """The nodes that were taken."""
        return _taken(self.asked, self.nodes)

    @property
    def price(self) -> float:
        """Of a step, in whatever money ``price_per_hour`` is."""
        return self.step_s * _hire_s(self.cluster)

    def sentences(self) -> Iterator[str]:
        """For people."""
        for pool, nodes in zip(self.asked.pools, self.nodes, strict=True):
            kind = f"{pool.chips_per_node} x {pool.chip.name}"
            yield (
                f"takes {nodes} of {pool.num_nodes} nodes of {kind}, {pool.price_per_hour:g} an "
                "hour for each chip"
            )
        millions = 1e6 / self.tokens
        yield (
            f"{self.price * millions:.3g} for a million tokens, the least of {self.choices} "
            f"choices of nodes ({self.searched} searched); none can cost less than "
            f"{self.least * millions:.3g}"
        )

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {
            "by": "price of a step",
            "price": self.price,
            "least": self.least,
            "choices": self.choices,
            "searched": self.searched,
            "nodes": [
                {"chip": pool.chip.name, "nodes": nodes}
                for pool, nodes in zip(self.asked.pools, self.nodes, strict=True)
            ],
        }


def cheapest(
    problem: Problem, within_s: float, *, progress: Progress | None = None
) -> tuple[Cheapest, Found]:
    """The choice of whole nodes whose best plan costs least a step of at most ``within_s``.

    Of each pool 0, 1, 2, 3, 4, 6, 8, 12, ... or all nodes may be taken. The lower bound of a
    search, times the hire, says what a choice costs at least: the least first, until no other can
    be cheaper. A choice that holds the model only with state elsewhere is none, but all nodes are.

    Raises:
        ConfigError: a pool has no price, or no plan that was found is so fast.
        NoPlan: not even all nodes hold the model.
    """
    unpriced = [p.chip.name for p in problem.cluster.pools if p.price_per_hour is None]
    if unpriced:
        expected = "price_per_hour, of one chip, in every pool of the cluster file"
        raise ConfigError("--cheapest", ", ".join(unpriced), expected, "It has none there.")
    choices = list(_choices(problem.cluster))
    bounds = {nodes: _least_s(problem.on(_taken(problem.cluster, nodes))) for nodes in choices}
    prices = {
        nodes: least_s * _hire_s(_taken(problem.cluster, nodes))
        for nodes, least_s in bounds.items()
        if least_s <= within_s and least_s < inf
    }
    best: tuple[float, tuple[int, ...], Found] | None = None
    searched, fastest_s = 0, inf
    for nodes in sorted(prices, key=lambda nodes: (prices[nodes], nodes)):
        if best is not None and prices[nodes] >= best[0]:
            break
        taken = _taken(problem.cluster, nodes)
        searched += 1
        try:
            found = search(problem.on(taken), progress=progress)
        except NoPlan:
            continue
        step_s = found.best.time.step_s
        fastest_s = min(fastest_s, step_s)
        price = step_s * _hire_s(taken)
        if step_s <= within_s and (best is None or price < best[0]):
            best = price, nodes, found
    if best is None:
        nodes, found = tuple(pool.num_nodes for pool in problem.cluster.pools), search(problem)
        step_s = found.best.time.step_s
        if step_s > within_s:
            raise _too_slow(within_s, min(step_s, fastest_s))
        prices[nodes] = step_s * _hire_s(problem.cluster)  # with state elsewhere
    else:
        _, nodes, found = best
    chosen = Cheapest(
        asked=problem.cluster,
        nodes=nodes,
        step_s=found.best.time.step_s,
        tokens=problem.workload.samples * problem.workload.seq_len,
        least=min(prices.values()),
        choices=len(choices),
        searched=searched,
    )
    return chosen, found


def _too_slow(within_s: float, fastest_s: float) -> ConfigError:
    expected = f"at least {fastest_s:.3g}, the seconds of the fastest plan for these nodes"
    return ConfigError("--within", within_s, expected, "More or faster nodes could take less.")


def _choices(cluster: ClusterView) -> Iterator[tuple[int, ...]]:
    """Nodes of each pool, and of some pool one at least."""
    stairs = (_stairs(pool.num_nodes) for pool in cluster.pools)
    return filter(any, product(*stairs))


def _stairs(most: int) -> list[int]:
    """0, powers of two, halves more than those, and ``most``."""
    powers = [1 << k for k in range(most.bit_length())]
    between = [3 * power for power in powers]
    return sorted({0, most, *(number for number in powers + between if number < most)})


def _taken(cluster: ClusterView, nodes: tuple[int, ...]) -> ClusterView:
    pools = zip(cluster.pools, nodes, strict=True)
    return replace(
        cluster,
        pools=tuple(
            replace(pool, num_nodes=number, hosts=pool.hosts[:number])
            for pool, number in pools
            if number
        ),
    )


def _hire_s(cluster: ClusterView) -> float:
    """Of all chips, a second."""
    return sum(pool.num_chips * (pool.price_per_hour or 0.0) for pool in cluster.pools) / 3600


def _least_s(problem: Problem) -> float:
    """That no plan beats; infinite where state would have to be elsewhere."""
    return Relaxed(problem).least_s(range(len(problem.cluster.pools)))
