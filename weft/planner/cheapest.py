"""The nodes of a cluster on which a step costs least: hired for as long as it takes, all of them.

More chips make a step faster and rarely cheaper, for what they wait for each other is paid as well:
without a limit of time few nodes are the answer, of the kind that computes most for its price.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError
from weft.planner.problem import Problem
from weft.planner.search import Candidate, Found, Watch
from weft.planner.some_nodes import ByCost, some_nodes


@dataclass(frozen=True, kw_only=True)
class Cheapest(ByCost):
    """Nodes that were chosen, and what a step on them costs."""

    def sentences(self) -> Iterator[str]:
        """For people."""
        for words, pool in zip(self.chosen.taken(), self.chosen.asked.pools, strict=True):
            yield f"{words}, {pool.price_per_hour:g} an hour for each chip"
        millions = 1e6 / self.tokens
        yield (
            f"{self.chosen.cost * millions:.3g} for a million tokens, the least of "
            f"{self.chosen.choice}; none can cost less than {self.chosen.least * millions:.3g}"
        )

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        costs = {"price": self.chosen.cost, "least": self.chosen.least}
        return {"by": "price of a step", **costs, **self.chosen.as_json()}


class _Hire:
    """Of all chips, in whatever money ``price_per_hour`` is."""

    def least(self, taken: ClusterView, step_s: float) -> float:
        return step_s * sum(p.num_chips * (p.price_per_hour or 0.0) for p in taken.pools) / 3600

    def of(self, taken: ClusterView, best: Candidate) -> float:
        return self.least(taken, best.time.step_s)


def cheapest(
    problem: Problem, within_s: float, *, watch: Watch | None = None
) -> tuple[Cheapest, Found]:
    """``some_nodes`` by their price.

    Raises:
        ConfigError: a pool has no price, or no plan that was found is so fast.
        NoPlan: not even all nodes hold the model.
    """
    unpriced = [p.chip.name for p in problem.cluster.pools if p.price_per_hour is None]
    if unpriced:
        expected = "price_per_hour, of one chip, in every pool of the cluster file"
        raise ConfigError("--cheapest", ", ".join(unpriced), expected, "It has none there.")
    chosen = some_nodes(problem, _Hire(), within_s, watch=watch)
    tokens = problem.workload.samples * problem.workload.seq_len
    return Cheapest(chosen=chosen, tokens=tokens), chosen.found
