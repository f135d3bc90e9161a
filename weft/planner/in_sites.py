"""Sites that train for themselves: the best plan of each, and what that gains over exact training.

Between two meetings nothing crosses, so each site's plan is a search of its own, and the samples of
a step are divided as fast as sites are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, combinations, pairwise
from math import ceil, comb, floor, inf
from time import perf_counter
from typing import Any

from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError
from weft.config.sections import SitesConfig
from weft.cost.traffic import Far
from weft.models.registry import param_specs
from weft.plan.plan import PipelinePlan, Plan
from weft.plan.tiling import split_by_weight
from weft.planner.naming import name_of
from weft.planner.problem import Problem
from weft.planner.search import Candidate, Found, NoPlan, Watch, search
from weft.planner.search.found import Pruned
from weft.planner.search.least import Relaxed, soonest
from weft.planner.sites import check_sites

MOST_ROUNDS = 3
"""Of dividing the samples anew by what sites took."""
MOST_MOVES, MOVED_ONE_BY_ONE = 8, 64
"""Of a sample to another site, after that; from one with at most so many, for which it matters."""
USUAL_ROUNDS = (100, 200, 500)
"""Steps from one meeting to the next, as DiLoCo was measured with."""
ABOUT = (0.9, 1.0, 1.25)
"""Times a site's share by speed: samples of which the least seconds are asked."""
SMALL_PART = 0.1
FINE = 1 << 20
"""Speeds of sites are told in so many parts of the sum."""


def search_in_sites(problem: Problem, asked: SitesConfig, *, watch: Watch | None = None) -> Found:
    """The fastest plan whose sites are those of the cluster.

    Raises:
        NoPlan: some site cannot hold the model.
        ConfigError: the cluster has no sites, or a step not a sample for each.
    """
    begin, places = perf_counter(), problem.cluster.farthest_sites
    if asked.pipelines is not None:
        hint = "The planner makes each site of the cluster's file one, with pipelines of its own."
        raise ConfigError("sites.pipelines", asked.pipelines, "null beside a search", hint)
    if len(places) < 2:
        hint = "Or give a plan, of which each pipeline is a site."
        raise ConfigError("sites", "a section", "sites in the cluster's file (pools[].site)", hint)
    samples = problem.workload.samples
    if samples < len(places):
        raise ConfigError("batch.samples", samples, f"at least {len(places)}, one for each site")
    names, parts = [*places], [*places.values()]

    @cache
    def of_site(number: int, share: int) -> Found:
        try:
            return search(_of_site(problem, parts[number], share), watch=watch)
        except NoPlan as none:
            expected = f"{none.expected} at site {names[number].name}, which trains for itself"
            raise NoPlan(none.key, none.value, expected, none.hint) from none

    best = _fastest(of_site, samples, [_peak(part) for part in parts])
    every = [_of_site(problem, part, samples) for part in parts]
    whole = _together(best, problem, perf_counter() - begin, least_apart(every))
    tried = of_site.cache_info().currsize // len(parts)
    left = comb(samples - 1, len(parts) - 1) - tried
    if left > 0:
        whole.pruned.add("limit", "other ways to share the samples among sites", left)
        whole = replace(whole, considered=whole.considered + left)
    return whole


def _fastest(
    of_site: Callable[[int, int], Found], samples: int, speeds: Sequence[float]
) -> list[Found]:
    """What sites find for shares of the samples by speed, then by what they took; then until none
    would end sooner with a sample less.

    Args:
        of_site: Of a site's number and its share.
        speeds: To begin with.
    """

    def of_all(shares: Sequence[int]) -> list[Found]:
        return [of_site(number, share) for number, share in enumerate(shares)]

    def longest(shares: Sequence[int]) -> float:
        try:
            return _longest(of_all(shares))
        except NoPlan:  # it has less than a microbatch
            return inf

    shares, best = list[int](), list[Found]()
    for _ in range(MOST_ROUNDS):
        other = _shares(samples, speeds)
        found = of_all(other)
        if best and _longest(found) >= _longest(best):
            break
        shares, best = other, found
        speeds = [n / each.best.time.step_s for n, each in zip(shares, best, strict=True)]
    for _ in range(MOST_MOVES):
        other = min(_moved(shares, best), key=longest, default=shares)
        if longest(other) >= _longest(best):
            break
        shares, best = other, of_all(other)
    return best


def _moved(shares: Sequence[int], found: Sequence[Found]) -> Iterator[list[int]]:
    """A sample less for the slowest site, and one more for another."""
    giver = max(range(len(found)), key=lambda number: found[number].best.time.step_s)
    for taker in range(len(shares)) if 1 < shares[giver] <= MOVED_ONE_BY_ONE else ():
        if taker != giver:
            yield [n + (number == taker) - (number == giver) for number, n in enumerate(shares)]


def least_apart(every: Sequence[Problem]) -> float:
    """Seconds of a step at least, however its samples are shared among sites: each of these
    problems is of one, as if it had all of them.

    Each has one sample or more, and of fewer at least that part of the seconds of more: the fewer
    there are, the more of a step its pipelines fill and drain. Seconds of more are those of all,
    and of some about as large as its share by speed; of round numbers, which microbatches of many
    sizes divide.
    """
    samples, sites = every[0].workload.samples, range(len(every))

    @cache
    def least_s(number: int, share: int) -> float:
        one = every[number]
        return Relaxed(_of_site(one, one.cluster, share)).least_s(range(len(one.cluster.pools)))

    whole = _round(samples)
    together = 1 / sum(1 / least_s(number, whole) for number in sites)

    @cache
    def rates(number: int) -> list[tuple[int, float]]:
        """Up to how many samples, the most first, how many of them at least take a second."""
        about = whole * together / least_s(number, whole)
        asked = {whole, *(min(whole, _round(ceil(about * more))) for more in ABOUT)}
        return [(share, share / least_s(number, share)) for share in sorted(asked, reverse=True)]

    def most(number: int, seconds: float) -> int:
        """Samples of a site in so long."""
        found, by_more = 0, inf
        for (end, rate), (next_end, _) in pairwise([*rates(number), (0, 0.0)]):
            by_more = min(by_more, seconds * rate)
            share = floor(min(end, by_more))
            found = max(found, share if share > next_end else 0)
        return found

    ones = max(least_s(number, 1) for number in sites)
    return max(ones, soonest(lambda s: sum(most(number, s) for number in sites) >= samples))


def _round(number: int) -> int:
    """The next of at most three binary digits, and zeros."""
    step = 1 << max(0, number.bit_length() - 3)
    return -(-number // step) * step


def _of_site(problem: Problem, part: ClusterView, samples: int) -> Problem:
    return replace(
        problem,
        cluster=part,
        workload=replace(problem.workload, samples=samples),
        options=replace(problem.options, domains=False),
    )


def _peak(part: ClusterView) -> float:
    """Of all chips of a site, to begin with."""
    return max(1.0, sum(pool.num_chips * pool.chip.product_flops for pool in part.pools))


def _shares(samples: int, speeds: Sequence[float]) -> list[int]:
    """By speed, one at least."""
    weights = [round(speed / sum(speeds) * FINE) for speed in speeds]
    shares = [max(1, share) for share in split_by_weight(samples, weights)]
    shares[shares.index(max(shares))] -= sum(shares) - samples
    return shares


def _longest(found: Sequence[Found]) -> float:
    return max(each.best.time.step_s for each in found)


def _together(found: Sequence[Found], problem: Problem, seconds: float, least_s: float) -> Found:
    """One plan of those of all sites."""
    pipelines: list[PipelinePlan] = []
    pools: list[ChipPool] = []
    sizes: list[int] = []
    for best in (each.best for each in found):
        first, size = sum(sizes), best.cluster.world_size
        moved = best.plan.on_ranks(range(first, first + size))
        pipelines += moved.pipelines
        pools += best.cluster.pools
        sizes.append(size)
    ends = list(accumulate(sizes, initial=0))
    plan = Plan(
        num_layers=problem.workload.spec.num_layers,
        pipelines=tuple(pipelines),
        sites=tuple(tuple(range(*both)) for both in pairwise(ends)),
    )
    check_sites(plan)
    there = problem.on(ClusterView(tuple(pools)))
    pruned = Pruned()
    for each in found:
        for kind, out in each.pruned.reasons.items():
            pruned.add(kind, out.examples[0], out.count, *(out.bounds or ()))
    return Found(
        best=Candidate(
            name=name_of(plan, there.cluster),
            plan=plan,
            cluster=there.cluster,
            time=there.time(plan),
            memory=there.memory(plan),
        ),
        others=(),
        considered=sum(each.considered for each in found),
        simulated=sum(each.simulated for each in found),
        pruned=pruned,
        bound_s=least_s,
        seconds=seconds,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Apart:
    """What sites reach that train for themselves and meet now and then."""

    asked: SitesConfig
    step_s: float
    """Of a step in which they do not meet."""
    meeting_s: float
    """Of a round of ``asked.every`` steps, what they wait for each other's outer gradients."""
    tokens: int
    """Of a step."""
    exact_s: float | None = None
    """A step of exact training, where that was planned too."""

    @property
    def tokens_per_s(self) -> float:
        """Meetings counted."""
        return self.tokens / (self.step_s + self.meeting_s / self.asked.every)

    @property
    def gain(self) -> float | None:
        """Tokens a second against exact training's."""
        return None if self.exact_s is None else self.tokens_per_s * self.exact_s / self.tokens

    @property
    def words(self) -> str:
        """What exact training costs and this gains; of a plan with sites what meetings cost."""
        every, reached = self.asked.every, f"{self.tokens_per_s:,.0f} tokens/s"
        waits = f"wait {self.meeting_s:.3g} s of a round for each other"
        if self.exact_s is None or self.gain is None:
            return f"{self.asked.in_words}; they {waits} and so reach {reached}"
        late = ceil(self.meeting_s / self.step_s)
        hidden = f" (sites.delay={late} hides it)" if late < every else ""
        return (
            f"sites: exact training, planned here, takes {self.exact_s:.4g} s a step, "
            f"{self.tokens / self.exact_s:,.0f} tokens/s. Sites that train for themselves and meet "
            f"every {every} steps {waits}{hidden} and so reach {reached}, {self.gain:.3g} times as "
            f"many, but numbers then depend on the plan: sites.every={every} asks for it"
        )

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "every": self.asked.every,
            "step_time_s": self.step_s,
            "meeting_s": self.meeting_s,
            "tokens_per_s": self.tokens_per_s,
            "exact_step_time_s": self.exact_s,
            "gain": self.gain,
        }


def meeting(plan: Plan, problem: Problem, asked: SitesConfig, step_s: float) -> float:
    """Seconds of a round in which sites wait: each sends its part to every other one.

    ``step_s``: of a step, which go on while outer gradients travel, where ``asked`` says so.
    """
    training = problem.workload.training
    specs = param_specs(problem.workload.spec)
    trained = sum(training.part(spec.unit) * spec.numel for spec in specs)
    sent = (len(plan.sites) - 1) * trained * asked.value_bytes / asked.fragments
    ways = (Far.between(*ends) for ends in combinations(problem.cluster.farthest_sites, 2))
    each = max(way.seconds(sent) + way.latency_s for way in ways)
    return asked.fragments * max(each - asked.delay * step_s, 0.0)


def long_enough(plan: Plan, problem: Problem) -> SitesConfig:
    """The shortest usual round of which sites wait for each other a small part, or the longest."""
    step_s = problem.time(plan).step_s
    every = [SitesConfig(every=steps) for steps in USUAL_ROUNDS]
    small = (
        asked
        for asked in every
        if meeting(plan, problem, asked, step_s) <= SMALL_PART * asked.every * step_s
    )
    return next(small, every[-1])


def apart(
    plan: Plan, problem: Problem, asked: SitesConfig, *, exact_s: float | None = None
) -> Apart:
    """What a plan with sites reaches on the chips of a problem."""
    step_s = problem.time(plan).step_s
    return Apart(
        asked=asked,
        step_s=step_s,
        meeting_s=meeting(plan, problem, asked, step_s),
        tokens=plan.global_batch * problem.workload.seq_len,
        exact_s=exact_s,
    )
