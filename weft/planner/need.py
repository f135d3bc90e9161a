"""Nodes chosen by compute: a mix of those that a pool has, by what a workload reaches on them.

A chip counts for the model FLOPs a second that this model and sequence reach on it, by the same
costs that plans are compared with, not for its name or its printed peak: long sequences favour
chips that are good at attention, small models those with fast memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10

from weft.cluster.cluster import HOST
from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError
from weft.cost.choice import StageChoice, dtype_of
from weft.cost.flops import train_flops_per_token
from weft.cost.timing import stage_times
from weft.cost.work import StageWork
from weft.models.registry import shape_of
from weft.planner.problem import Problem

UNITS = {"TF": 1e12, "PF": 1e15, "EF": 1e18}


def parse_need(text: str) -> float:
    """``2.0PF`` -> FLOP/s.

    Raises:
        ConfigError: no number with a unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(TF|PF|EF)(?:LOP/s|LOPS)?\s*", text)
    if found is None or float(found[1]) == 0:
        expected = "a number and a unit: TF, PF or EF (10^12, 10^15, 10^18 FLOP/s)"
        raise ConfigError("--need", text, expected, "For example 2.0PF.")
    return float(found[1]) * UNITS[found[2]]


def in_units(flops_s: float) -> str:
    """``2.04 PF``."""
    unit = next((each for each in ("EF", "PF") if flops_s >= UNITS[each]), "TF")
    number = flops_s / UNITS[unit]
    return f"{number:,.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"


def reached_flops(pool: ChipPool, problem: Problem) -> float:
    """Model FLOPs a second that one chip computes of the workload, without waiting for others: of
    microbatches of 1, 2, 4 samples and so on those that it is best at."""
    workload, spec = problem.workload, problem.workload.spec
    whole = StageWork(
        layers=(0, spec.num_layers),
        embeds=True,
        predicts=True,
        samples=1,
        seq_len=workload.seq_len,
        dtype=dtype_of(workload.precision),
        apart=pool.chip.device != HOST and not workload.training.compiled,
        wide_products=workload.training.wide_products,
    )
    hardware = problem.knowledge.hardware_of(pool)
    sizes = [1 << power for power in range(workload.samples.bit_length())]
    choices = [StageChoice(work=whole._replace(samples=size)) for size in sizes]
    each_s = min(
        stage_times(shape_of(spec), choice, hardware).whole_s / size
        for size, choice in zip(sizes, choices, strict=True)
    )
    return train_flops_per_token(spec, workload.seq_len) * workload.seq_len / each_s


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesTaken:
    """Nodes taken from one pool."""

    pool: ChipPool
    num_nodes: int
    flops_s: float
    """Reached by one chip."""
    cost: float
    """Of one chip: its price an hour, or 1."""

    @property
    def total_flops(self) -> float:
        return self.num_nodes * self.pool.chips_per_node * self.flops_s

    @property
    def total_cost(self) -> float:
        return self.num_nodes * self.pool.chips_per_node * self.cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Which nodes, and why."""

    parts: tuple[NodesTaken, ...]
    """Of every pool, in their order; some may give none."""
    by_price: bool

    @property
    def cluster(self) -> ClusterView:
        """The nodes that were taken."""
        taken = [replace(p.pool, num_nodes=p.num_nodes) for p in self.parts if p.num_nodes]
        return ClusterView(tuple(taken))

    @property
    def flops_s(self) -> float:
        return sum(part.total_flops for part in self.parts)

    @property
    def cost(self) -> float:
        """Of all nodes: an hour's price, or the number of chips."""
        return sum(part.total_cost for part in self.parts)

    @property
    def most_flops(self) -> float:
        """With all nodes of all pools."""
        return sum(replace(p, num_nodes=p.pool.num_nodes).total_flops for p in self.parts)

    def with_nodes(self, some: Sequence[int], nodes: int) -> Mix:
        """With so many of each of these pools."""
        parts = enumerate(self.parts)
        return replace(
            self, parts=tuple(replace(p, num_nodes=nodes) if n in some else p for n, p in parts)
        )

    def sentences(self) -> Iterator[str]:
        """For people."""
        for part in self.parts:
            pool = part.pool
            cost = part.cost / part.flops_s * 1e15
            price = f", {cost:.3g} an hour for each PF" if self.by_price else ""
            yield (
                f"takes {part.num_nodes} of {pool.num_nodes} nodes of {pool.chips_per_node} x "
                f"{pool.chip.name}: {in_units(part.flops_s)} a chip for this workload{price}"
            )
        yield f"{in_units(self.flops_s)} of computing in all, {self._aim()}"

    def _aim(self) -> str:
        if self.by_price:
            return f"at the lowest price: {self.cost:.4g} an hour"
        unpriced = [p.pool.chip.name for p in self.parts if p.pool.price_per_hour is None]
        if len(unpriced) == len(self.parts):
            return "with the fewest chips, for no pool has a price_per_hour"
        return f"with the fewest chips, for {', '.join(unpriced)} has no price_per_hour"

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {
            "flops_s": self.flops_s,
            "by": "price" if self.by_price else "chips",
            "nodes": [
                {"chip": p.pool.chip.name, "nodes": p.num_nodes, "flops_s_per_chip": p.flops_s}
                for p in self.parts
            ],
        }


def choose_mix(problem: Problem, need: float) -> Mix:
    """The cheapest whole nodes that compute so much; without all prices, the fewest chips.

    Raises:
        ConfigError: all nodes together do not reach it.
    """
    pools = problem.cluster.pools
    by_price = all(pool.price_per_hour is not None for pool in pools)
    parts = [
        NodesTaken(
            pool=pool,
            num_nodes=0,
            flops_s=reached_flops(pool, problem),
            cost=(pool.price_per_hour or 0.0) if by_price else 1.0,
        )
        for pool in pools
    ]
    nothing = Mix(parts=tuple(parts), by_price=by_price)
    everything = nothing.most_flops
    if everything < need:
        has = ", ".join(f"{p.pool.num_chips} x {p.pool.chip.name}" for p in parts)
        last = 10 ** (floor(log10(everything)) - 2)  # of three digits: what is said can be had
        most = in_units(everything // last * last)
        expected = f"at most {most}, what the pool computes of this workload"
        raise ConfigError("--need", in_units(need), expected, f"It has {has}.")
    order = sorted(range(len(parts)), key=lambda n: (parts[n].cost / parts[n].flops_s, n))
    best = _cheapest(nothing, order, need)
    assert best is not None, f"{everything} FLOP/s are there, and no mix reaches {need}"
    return best


def _cheapest(mix: Mix, order: Sequence[int], need: float, best: Mix | None = None) -> Mix | None:
    """Decide the pools in ``order``, the cheapest compute first, most nodes first.

    What is left costs at least its FLOPs at the rate of the next pool; mixes that cannot be
    cheaper than the best so far, by that bound, are left out.
    """
    left = need - mix.flops_s
    if left <= need * 1e-12:
        return mix if best is None or _rank(mix) < _rank(best) else best
    if not order:
        return best
    pool = mix.parts[order[0]].pool
    machine = [n for n in order if n == order[0] or mix.parts[n].pool.node == pool.node != ""]
    others = [n for n in order if n not in machine]
    node = mix.with_nodes(machine, 1).flops_s - mix.flops_s
    for nodes in range(min(ceil(left / node), pool.num_nodes), -1, -1):
        taken = mix.with_nodes(machine, nodes)
        if best is None or not _costs_more(taken, others, need, best):
            best = _cheapest(taken, others, need, best)
        elif len(machine) == 1:
            break  # fewer of the cheap nodes only cost more; others may cost less than a machine
    return best


def _costs_more(mix: Mix, others: Sequence[int], need: float, best: Mix) -> bool:
    """Whatever is taken of other pools, the cheapest compute first."""
    rest = need - mix.flops_s
    if not others or rest <= 0:
        return False
    after = mix.parts[others[0]]
    return mix.cost + rest * after.cost / after.flops_s > best.cost * (1 + 1e-9)


def _rank(mix: Mix) -> tuple[float, int, float]:
    """Cost, then kinds, then what is more than enough."""
    return round(mix.cost, 9), sum(part.num_nodes > 0 for part in mix.parts), mix.flops_s
