"""The nodes of a cluster on which a step costs least: hired for as long as it takes, all of them.

More chips make a step faster and rarely cheaper, for what they wait for each other is paid as well:
without a limit of time few nodes are the answer, of the kind that computes most for its price.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod
from typing import NamedTuple

from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError
from weft.planner.problem import Problem
from weft.planner.search import Found, NoPlan, Progress, fits, search
from weft.planner.search.least import Relaxed

MOST_CHOICES = 256
"""Of nodes, as far as pools are few: each is bounded, which takes a second for 10,000 chips."""


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

    Of each pool 0, 1, 2, 3, 4, 6, 8, 12, ... or all nodes may be taken; of large ones powers of 2,
    4, 8, ..., for ``MOST_CHOICES`` in all. The lower bound of a search, times the hire, says what a
    choice costs at least: the least first, until no other can be cheaper. A choice that holds the
    model only with state elsewhere is none, but all nodes are.

    Raises:
        ConfigError: a pool has no price, or no plan that was found is so fast.
        NoPlan: not even all nodes hold the model.
    """
    _refuse_unpriced(problem.cluster)
    every = tuple(pool.num_nodes for pool in problem.cluster.pools)
    choices = list(_choices(problem.cluster))
    least = dict(_least(problem, choices, within_s, progress))
    best: _Searched | None = None
    searched, fastest_s = 0, inf
    for nodes in sorted(least, key=lambda nodes: (least[nodes], nodes)):
        if best is not None and least[nodes] >= best.price:
            break
        searched += 1
        tried = _searched(problem, nodes, progress)
        if tried is not None:
            fastest_s = min(fastest_s, tried.step_s)
            if tried.step_s <= within_s and (best is None or tried.price < best.price):
                best = tried
    if best is None:  # perhaps with state elsewhere
        best = _of_these(problem, every, search(problem, progress=progress))
        if best.step_s > within_s:
            raise _too_slow(within_s, min(best.step_s, fastest_s))
    chosen = Cheapest(
        asked=problem.cluster,
        nodes=best.nodes,
        step_s=best.step_s,
        tokens=problem.workload.samples * problem.workload.seq_len,
        least=min([best.price, *least.values()]),
        choices=len(choices),
        searched=searched,
    )
    return chosen, best.found


class _Searched(NamedTuple):
    """A choice with its best plan."""

    nodes: tuple[int, ...]
    found: Found
    step_s: float
    price: float
    """Of a step."""


def _searched(
    problem: Problem, nodes: tuple[int, ...], progress: Progress | None
) -> _Searched | None:
    """None: these nodes do not hold the model, or only with state elsewhere."""
    taken = problem.on(_taken(problem.cluster, nodes))
    if not fits(taken):
        return None
    try:
        return _of_these(problem, nodes, search(taken, progress=progress))
    except NoPlan:
        return None


def _of_these(problem: Problem, nodes: tuple[int, ...], found: Found) -> _Searched:
    step_s = found.best.time.step_s
    return _Searched(nodes, found, step_s, step_s * _hire_s(_taken(problem.cluster, nodes)))


def _refuse_unpriced(cluster: ClusterView) -> None:
    unpriced = [pool.chip.name for pool in cluster.pools if pool.price_per_hour is None]
    if unpriced:
        expected = "price_per_hour, of one chip, in every pool of the cluster file"
        raise ConfigError("--cheapest", ", ".join(unpriced), expected, "It has none there.")


def _least(
    problem: Problem,
    choices: Sequence[tuple[int, ...]],
    within_s: float,
    progress: Progress | None,
) -> Iterator[tuple[tuple[int, ...], float]]:
    """What a step costs at least, of choices that may hold the model and be fast enough."""
    for number, nodes in enumerate(choices):
        if progress is not None:
            progress(number, inf)
        taken = _taken(problem.cluster, nodes)
        least_s = Relaxed(problem.on(taken)).least_s(range(len(taken.pools)))
        if least_s <= within_s and least_s < inf:
            yield nodes, least_s * _hire_s(taken)


def _too_slow(within_s: float, fastest_s: float) -> ConfigError:
    expected = f"at least {fastest_s:.3g}, the seconds of the fastest plan for these nodes"
    return ConfigError("--within", within_s, expected, "More or faster nodes could take less.")


def _choices(cluster: ClusterView) -> Iterator[tuple[int, ...]]:
    """Nodes of each pool, and of some pool one at least."""
    most = [pool.num_nodes for pool in cluster.pools]
    stairs: list[list[int]] = []
    for step in range(max(most).bit_length() + 1):
        stairs = [_stairs(number, step) for number in most]
        if prod(map(len, stairs)) <= MOST_CHOICES:
            break
    return filter(any, product(*stairs))


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
            replace(pool, num_nodes=number, hosts=pool.hosts[:number])
            for pool, number in pools
            if number
        ),
    )


def _hire_s(cluster: ClusterView) -> float:
    """Of all chips, a second."""
    return sum(pool.num_chips * (pool.price_per_hour or 0.0) for pool in cluster.pools) / 3600
