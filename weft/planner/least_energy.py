"""The nodes of a cluster on which a step takes least energy, as ``forecast`` counts it.

Chips that wait draw power too, so more of them take more for the same work: without a limit of time
few nodes are the answer, of the kind that computes most for its power.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from weft.cluster.cluster import Chip
from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError
from weft.cost.work import share
from weft.planner.forecast import WAITING, forecast
from weft.planner.problem import Problem
from weft.planner.search import Candidate, Found, Watch
from weft.planner.search.choice import num_ranks
from weft.planner.search.costs import KnownCosts
from weft.planner.search.reached import Kinds
from weft.planner.some_nodes import ByCost, some_nodes


@dataclass(frozen=True, kw_only=True)
class LeastEnergy(ByCost):
    """Nodes that were chosen, and what a step on them takes."""

    def sentences(self) -> Iterator[str]:
        """For people."""
        for words, pool in zip(self.chosen.taken(), self.chosen.asked.pools, strict=True):
            yield f"{words}, {_power_w(pool.chip):g} W each"
        yield (
            f"{self.chosen.cost / self.tokens:.3g} J a token, with chips that the plan leaves out "
            f"waiting, the least of {self.chosen.choice}; none can take less than "
            f"{self.chosen.least / self.tokens:.3g}"
        )

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        joules = {"joules": self.chosen.cost, "least_joules": self.chosen.least}
        return {"by": "energy of a step", **joules, **self.chosen.as_json()}


class _Joules:
    """Of all chips and links: chips take their power while they compute, and less while they
    wait, used or not."""

    def __init__(self, problem: Problem) -> None:
        kinds = Kinds(problem.with_links(inf, inf), 1, KnownCosts(), any_room=True)
        samples, pools = problem.workload.samples, problem.cluster.pools
        self.problem = problem
        self._chip_s = dict.fromkeys((pool.chip.name for pool in pools), inf)
        """Of one chip of that name, for all layers of all samples at its best."""
        self._ends_j = inf
        """Of embedding and head, on whichever chips take least for them."""
        for number, pool in enumerate(pools):
            name, (layer_s, ends_s) = pool.chip.name, _of_a_sample(kinds, number)
            self._chip_s[name] = min(samples * kinds.num_layers * layer_s, self._chip_s[name])
            self._ends_j = min(samples * ends_s * _power_w(pool.chip), self._ends_j)

    def least(self, taken: ClusterView, step_s: float) -> float:
        """With what is sent for nothing, and as much computed as there is time for by those that
        take least for it, in that time or a longer one.

        What computing takes falls with time, as more of it is theirs, and what waiting takes grows:
        their sum is least at some time from which on fewer kinds than before do everything.
        """
        powers = {pool.chip.name: _power_w(pool.chip) for pool in taken.pools}
        numbers = Counter[str]()
        for pool in taken.pools:
            numbers[pool.chip.name] += pool.num_chips
        able = [name for name in powers if self._chip_s[name] < inf]
        chips = sorted(able, key=lambda name: self._chip_s[name] * powers[name])

        def joules(seconds: float) -> float:
            computing, left = self._ends_j, 1.0
            for name in chips:
                part = min(left, numbers[name] * seconds / self._chip_s[name])
                computing, left = computing + part * self._chip_s[name] * powers[name], left - part
            return WAITING * seconds * _all_w(taken) + (1 - WAITING) * computing

        rates = accumulate(numbers[name] / self._chip_s[name] for name in chips)
        return min(joules(max(step_s, 1 / rate)) for rate in rates)

    def of(self, taken: ClusterView, best: Candidate) -> float:
        cast = forecast(best.plan, self.problem.on(best.cluster), time=best.time)
        assert cast.energy_j is not None, f"a chip of {best.name} has no power_w"
        left_w = _all_w(taken) - _all_w(best.cluster)
        return cast.energy_j + WAITING * cast.step_s * left_w


def least_energy(
    problem: Problem, within_s: float, *, watch: Watch | None = None
) -> tuple[LeastEnergy, Found]:
    """``some_nodes`` by what they take.

    Raises:
        ConfigError: a chip's power is not known, or no plan that was found is so fast.
        NoPlan: not even all nodes hold the model.
    """
    unknown = {p.chip.name: None for p in problem.cluster.pools if p.chip.power_w is None}
    if unknown:
        expected = "power_w, watts at full load, of every chip of the cluster file"
        raise ConfigError("--least-energy", ", ".join(unknown), expected, "It has none.")
    chosen = some_nodes(problem, _Joules(problem), within_s, watch=watch)
    tokens = problem.workload.samples * problem.workload.seq_len
    return LeastEnergy(chosen=chosen, tokens=tokens), chosen.found


def _of_a_sample(kinds: Kinds, pool: int) -> tuple[float, float]:
    """Seconds of one chip of a pool for a layer, and for embedding and head, at least."""
    found = [(inf, inf)]
    for deep in kinds.best_first(pool):
        unit, samples = kinds.meshes.unit(*deep.unit), deep.each * share(deep.inner, "samples")
        chips = num_ranks(deep.inner) / samples
        found.append((chips * unit.layer_s, chips * unit.ends_s))
    layer_s, ends_s = map(min, zip(*found, strict=True))
    return layer_s, ends_s


def _power_w(chip: Chip) -> float:
    assert chip.power_w is not None, f"{chip.name} has no power_w"
    return chip.power_w


def _all_w(cluster: ClusterView) -> float:
    """Of all its chips, while they compute."""
    return sum(pool.num_chips * _power_w(pool.chip) for pool in cluster.pools)
