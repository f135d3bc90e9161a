"""The search itself: which kinds of chip go together, and how they share the samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain, combinations, islice, product
from math import inf
from operator import attrgetter
from time import perf_counter

from weft.cluster.cluster import HOST
from weft.cluster.view import ClusterView, count_by_level
from weft.planner.fit import shortages
from weft.planner.naming import name_of
from weft.planner.problem import Problem
from weft.planner.renumber import ordered
from weft.planner.runnable import why_never_run
from weft.planner.search.again import MODES_APART
from weft.planner.search.arrangements import Arrangement, arrangements, cut_in_two
from weft.planner.search.by_experts import by_experts
from weft.planner.search.by_heads import by_heads
from weft.planner.search.choice import (
    FEW_CHIPS,
    MANY_CHIPS,
    Apart,
    Line,
    Timed,
    plan_of,
    used_cluster,
    used_parts,
)
from weft.planner.search.collected import seldom_collected
from weft.planner.search.costs import Costs, KnownCosts
from weft.planner.search.domains import have_room, searches_domains, with_best_domains
from weft.planner.search.found import Candidate, Found, NoPlan, Pruned, together
from weft.planner.search.frames import UNMADE
from weft.planner.search.group import BRIEF_FIRST, UNCUT, WHOLE, Group, Kept, Ledger
from weft.planner.search.least import Relaxed
from weft.planner.search.lines import Lines, arrangement_of
from weft.planner.search.meshes import Meshes
from weft.planner.search.nearby import Place, fastest_nearby, is_open
from weft.planner.search.nearer import nearer
from weft.planner.search.no_plan import leanest, no_plan
from weft.planner.search.refined import BEST_FEW, refined
from weft.planner.search.sharing import Beside, shared
from weft.planner.search.united import united, with_united
from weft.planner.search.unlike_experts import unlike_experts, with_unlike_experts
from weft.planner.search.unlike_widths import unlike_widths, with_unlike_widths
from weft.planner.search.watch import Watch
from weft.schedules.registry import SCHEDULES

ALONE = 32
"""Times as much effort for a pool by itself: all its chips are alike, and bounds rule much out."""
THROUGH = 64
"""Likewise for one through two pools, where those that look best often are not; half as much more
for each pool more."""
AGAIN = 8
"""Likewise with more ways to recompute, of few chips: there are many combinations more."""
MOST_AGAIN = 8
"""Times that effort for all arrangements that are looked at again."""
MOST_TOGETHER = 4
"""Pools of which all arrangements are looked at: six have 876, and four 51."""
WITH_OTHERS = 256
"""Times the effort for one combination, for all those that have another pool besides."""
LEFT = "with more kinds than those that compute most, after the effort for such was spent"
LOOKED_ONCE = "less promising than those that were looked at again, with more ways to recompute"
ENDED = "not looked at, for the search was ended before"
LONGER = 8
"""Times as much effort where it ended before anything that fits was looked at."""
OF_MANY = 2
"""Times as much effort of many chips, of which more is to be decided."""
MOST_OTHERS = 5
BESIDE = 8
"""Times the effort for one combination, of many chips, for what is beside the best few."""


def search(
    problem: Problem, *, watch: Watch | None = None, known: KnownCosts | None = None
) -> Found:
    """The fastest plan that fits, wherever experts are. On devices they take no longer, so that
    others are looked at where memory rules something out.

    Args:
        watch: Is told how far it is; may end it as soon as something fits.
        known: From other searches.

    Raises:
        NoPlan: nothing fits.
        ConfigError: a rate is not known.
    """
    begin, found, none = perf_counter(), list[Found](), list[NoPlan]()
    watch, known = watch or Watch(), known or KnownCosts()
    if problem.cluster.world_size > MANY_CHIPS:
        options = replace(problem.options, effort=OF_MANY * problem.options.effort)
        problem = replace(problem, options=options)
    for tried in problem.by_expert_tier():
        if found and not ("memory" in found[0].pruned.reasons and fits(tried)):
            continue
        try:
            with seldom_collected():
                found.append(_searched(tried, watch, known))
        except NoPlan as error:
            none.append(error)
    if not found:
        raise none[0]
    answer = found[0]
    if len(found) + len(none) > 1:
        answer = replace(nearer(together(found), problem), seconds=perf_counter() - begin)
    best = answer.best
    fits_there = have_room(best.plan, problem.on(best.cluster), best.memory)
    assert fits_there, f"{best.name}: {shortages(best.plan, problem.on(best.cluster))}"
    return answer


def _searched(problem: Problem, watch: Watch, known: KnownCosts) -> Found:
    """With experts in the first tier that may be."""
    begin, options = perf_counter(), problem.options
    relaxed = Relaxed(problem, known)
    run = SearchRun(problem, relaxed, watch, known)
    run.look_everywhere()
    lists, near = run.lists(), run.near()
    if lists and options.mixed_recompute and run.lacks_memory:
        run.look_again()
        lists += run.lists()
        near += run.near(near)
    lists += run.look_nearby()
    if not any(lists):
        if not fits(problem):
            return _otherwise(run, begin, watch)
        # Something fits, and the effort ended before it was looked at.
        more = replace(options, effort=LONGER * options.effort)
        return _searched(replace(problem, options=more), watch, known)
    *every, beside = (
        (by_experts(by_heads(run.candidate(lines), problem), problem) for lines in found)
        for found in (*lists, near)
    )
    few = [with_best_domains([*each], problem) for each in every]
    fastest = refined(few, problem, beside, run.ledger.goes_on)
    if options.unlike_meshes and run.lacks_memory:
        fastest = with_united(fastest, problem, relaxed.of_one_mesh)
    fastest = with_unlike_widths(with_unlike_experts(fastest, problem), problem)
    return run.found(fastest, begin)


def _otherwise(run: SearchRun, begin: float, watch: Watch) -> Found:
    """What fits where all that was looked at does not: unlike chips as one mesh, state elsewhere.

    Raises:
        NoPlan: nothing.
    """
    problem = run.problem
    if run.options.unlike_meshes:
        every = (look(problem) for look in (united, unlike_experts, unlike_widths))
        if fastest := sorted(filter(None, every), key=lambda one: one.time.step_s):
            return run.found(fastest, begin)
    leaner = filter(None, (_elsewhere(problem), _divided(problem)))
    found = [_searched(each, watch, run.known) for each in leaner]
    found += filter(None, [_offloaded(problem, watch, run.known)])
    if found:
        return replace(nearer(together(found), problem), seconds=perf_counter() - begin)
    raise _not_run(run) or no_plan(any_fit, problem)


def _elsewhere(problem: Problem) -> Problem | None:
    """With what only updates need, and then parameters, in the first other tiers with which
    something fits."""
    _, *others = problem.options.elsewhere()
    tried = (replace(problem, options=options) for options in others)
    return next(filter(fits, tried), None)


def _divided(problem: Problem) -> Problem | None:
    """With tokens of each sample divided too, in the first tiers with which something fits."""
    for options in problem.options.elsewhere():
        divided = replace(problem, options=replace(options, divides_tokens=True))
        if not problem.divides_tokens and fits(divided):
            return divided
    return None


def _offloaded(problem: Problem, watch: Watch, known: KnownCosts) -> Found | None:
    """With all that layers keep on the hosts, where these have room; of schedules that wait with no
    weight gradients, which would need it again."""
    options, pools = problem.options, problem.cluster.pools
    whole = tuple(s for s in options.schedules if not SCHEDULES[s].splits_backward)
    if not options.mixed_recompute or not whole or any(p.chip.device == HOST for p in pools):
        return None
    for tiers in options.elsewhere():
        asked = replace(tiers, recompute=("offload",), schedules=whole, mixed_recompute=False)
        tried = replace(problem, options=asked)
        if fits(tried):
            found = _searched(tried, watch, known)
            every = (found.best, *found.others)
            roomy = [each for each in every if not shortages(each.plan, tried.on(each.cluster))]
            if roomy:
                return replace(found, best=roomy[0], others=tuple(roomy[1:]))
    return None


def _not_run(run: SearchRun) -> NoPlan | None:
    """Nothing was found for that only what can be run was looked at, and that did not fit."""
    out, options = run.ledger.pruned.reasons.get("unrun"), run.options
    if out is None or not fits(replace(run.problem, options=replace(options, only_runnable=False))):
        return None
    names = [pool.chip.name for pool in run.cluster.pools]
    expected = "chips on which this version can run a plan that fits"
    return NoPlan("cluster", names, expected, f"Left out: {out.examples[0]}")


def fits(problem: Problem) -> bool:
    """Some plan fits into the memory of the chips."""
    return any_fit(leanest(problem)) is not None


def any_fit(problem: Problem) -> Candidate | None:
    """A plan of one pipeline that fits, if there is one."""
    run = SearchRun(problem)
    for arrangement in arrangements(len(problem.cluster.pools), problem.options):
        if len(arrangement) == 1:
            run.look_at(arrangement, brief=len(problem.cluster.pools) > 1)
        found = run.distinct()
        if found:
            return run.candidate(found[0])
    return None


class SearchRun:
    """A search under way."""

    def __init__(
        self,
        problem: Problem,
        relaxed: Relaxed | None = None,
        watch: Watch | None = None,
        known: KnownCosts | None = None,
    ) -> None:
        """``relaxed``: of a problem that may do all that this one may, on the same pools."""
        self.problem, self.options, self.relaxed = problem, problem.options, relaxed
        self.cluster, self.samples = problem.cluster, problem.workload.samples
        self.ledger = Ledger(Pruned(), watch=watch or Watch())
        # Costs serve all arrangements of as many pipelines; a group stands beside several others.
        self.known = known or KnownCosts()
        self._costs = cache(self._costs_of)
        self._alike: Meshes | None = None
        self._meshes = cache(self._meshes_of)
        self._group = cache(lambda pools, *kind: Group(self._meshes(*kind), pools, self.ledger))
        self._missed: set[tuple[Group, Kept]] = set()
        self._found: list[Lines] = []

    def _costs_of(self, domains: bool, many: int, sites: tuple[int, ...]) -> Costs:
        options = replace(self.options, domains=domains)
        return self.known.of(replace(self.problem, options=options), many, sites)

    def _meshes_of(self, domains: bool, many: int, sites: tuple[int, ...]) -> Meshes:
        found = Meshes(self._costs(domains, many, sites), self._alike)
        self._alike = self._alike or found
        return found

    @property
    def cutoff(self) -> float:
        """The least step that is known, in seconds."""
        return self.ledger.best_s

    @property
    def has_few_chips(self) -> bool:
        """There is time to look at much."""
        return self.cluster.world_size <= FEW_CHIPS

    @property
    def has_time(self) -> bool:
        """To look longer at pipelines through several kinds, and to refine what is nearly as fast
        as the best."""
        return self.cluster.world_size <= MANY_CHIPS

    @property
    def lacks_memory(self) -> bool:
        """Some plan did not fit."""
        return "memory" in self.ledger.pruned.reasons

    def found(self, candidates: Sequence[Candidate], begin: float) -> Found:
        """What there is to say of a search that began then; ``candidates``: the fastest first."""
        return Found(
            best=candidates[0],
            others=tuple(candidates[1:]),
            considered=self.ledger.considered,
            simulated=self.ledger.simulated,
            pruned=self.ledger.pruned,
            is_cut_short=self.ledger.is_cut_short,
            bound_s=self.relaxed.least_s(range(len(self.cluster.pools))) if self.relaxed else 0.0,
            seconds=perf_counter() - begin,
        )

    def look_everywhere(self) -> None:
        """At all arrangements, and those of pools cut in two; then longer at each pool by itself,
        with what is known by then: as long as if there were no others; and at pipelines through
        several."""
        every = list(arrangements(len(self.cluster.pools), self.options))
        self._in_turn(every, brief=len(self.cluster.pools) > 1)
        for cluster, first in cut_in_two(self.cluster):
            if self.options.leave_idle or cluster.world_size == self.cluster.world_size:
                self.look_at_cut(cluster, first)
        for arrangement in every if len(self.cluster.pools) > 1 else ():
            if len(arrangement) == len(arrangement[0]) == 1:
                self.look_at(arrangement)
        if self.has_time and self.relaxed:
            self._look_longer(self.relaxed, every)

    def look_nearby(self) -> list[list[Lines]]:
        """At what the effort left out beside the best few of many chips; as ``lists``."""
        if self.has_time:
            return []
        known, enough = len(self._found), self._times(BESIDE)
        place = Place(
            lambda lines: self._groups(arrangement_of(lines)),
            self._is_open,
            self.options.schedules,
            self.cluster.pools,
            lambda: self.ledger.is_through(enough),
        )
        for lines in self.distinct()[:BEST_FEW]:
            if lines.cluster is self.cluster and (found := fastest_nearby(lines.lines, place)):
                self._add(found)
        return [sorted(self._found[known:], key=_step_s)]

    def _look_longer(self, relaxed: Relaxed, every: Sequence[Arrangement]) -> None:
        """At each pipeline through several pools, the most promising first."""
        through = [each for each in every if len(each) == 1 < len(each[0])]
        self._in_turn(sorted(through, key=relaxed.of), longer=True)

    def _in_turn(
        self, every: Sequence[Arrangement], *, brief: bool = False, longer: bool = False
    ) -> None:
        """At all of the pools that compute most, as if there were no more; then at those with
        others, as long as there is effort for them or nothing fits."""
        pools = range(len(self.cluster.pools))
        main = set(sorted(pools, key=lambda pool: -self._speed((pool,)))[:MOST_TOGETHER])
        inside = [each for each in every if main.issuperset(chain(*each))]
        for arrangement in inside:
            self.look_at(arrangement, brief=brief, longer=longer)
        known, enough = {*inside}, self._times(WITH_OTHERS)
        others = (each for each in every if each not in known)
        for arrangement in sorted(others, key=_united):
            self._look_within(arrangement, enough, LEFT, brief=brief, longer=longer)

    def look_again(self) -> None:
        """At those arrangements again that are nearly the best, the fastest first, with more ways
        to recompute: what is known rules most of it out by its bound."""
        times = AGAIN if self.has_few_chips else 1
        modes = *self.options.recompute, *MODES_APART
        options = replace(self.options, recompute=modes, effort=times * self.options.effort)
        worth = WORTH_A_LOOK * self.cutoff
        near = sorted((each for each in self._found if each.seconds < worth), key=_step_s)
        enough = self._times(MOST_AGAIN * times)
        clusters: list[ClusterView] = []
        for lines in near:
            if not any(lines.cluster is known for known in clusters):
                clusters.append(lines.cluster)
        for cluster in clusters:
            mine = (lines.arrangement for lines in near if lines.cluster is cluster)
            with self._beside(replace(self.problem.on(cluster), options=options)) as other:
                for arrangement in dict.fromkeys(mine):
                    other._look_within(arrangement, enough, LOOKED_ONCE)

    def _times(self, many: int) -> int:
        """Up to which effort, with so many times as much as for one combination from now on."""
        return self.ledger.effort + many * self.options.effort

    def _look_within(
        self,
        arrangement: Arrangement,
        enough: int,
        why: str,
        *,
        brief: bool = False,
        longer: bool = False,
    ) -> None:
        """Unless there was enough effort, and something fits."""
        if self.ledger.effort > enough and self.cutoff < inf:
            self.ledger.leave(1, why)
        else:
            self.look_at(arrangement, brief=brief, longer=longer)

    @contextmanager
    def _beside(self, problem: Problem) -> Iterator[SearchRun]:
        """A search of the same chips, otherwise asked, that goes on from what is known here; what
        it finds is found here."""
        same = problem.cluster is self.problem.cluster
        other = SearchRun(problem, self.relaxed if same else None, known=self.known)
        other.ledger = self.ledger
        yield other
        self._found += other._found

    def look_at(
        self, arrangement: Arrangement, *, brief: bool = False, longer: bool = False
    ) -> None:
        """Find the best of an arrangement, as far as it can be better than what is known.

        Args:
            brief: With no more effort for one pool than for others.
            longer: With more for several that were looked at before.
        """
        if len(arrangement) > self.samples or not self._allowed(arrangement):
            return
        if self.ledger.is_through():
            self.ledger.leave(1, ENDED)
            return
        if self.options.only_runnable and (why := why_never_run(self.cluster, arrangement)):
            self.ledger.considered += 1
            self.ledger.pruned.add("unrun", why)
            return
        if self._cannot_win(arrangement):
            return
        groups = self._groups(arrangement)
        if len(groups) == 1:
            self._alone(groups[0], brief=brief, longer=longer)
            return
        for kept in self._every_kept(domains=groups[0].options.domains):
            if all(group.may_keep(kept) for group in groups):
                self._side_by_side(groups, kept)

    def _groups(self, arrangement: Arrangement) -> list[Group]:
        domains = searches_domains(self.problem.on(self._chips_of(arrangement)))
        kind = domains, len(arrangement), self._sites_of(arrangement)
        return [self._group(group, *kind) for group in arrangement]

    def _cannot_win(self, arrangement: Arrangement) -> bool:
        """No plan of it is faster than what is known."""
        if self.relaxed is None:
            return False
        least_s = self.relaxed.of(arrangement)
        if least_s < self.cutoff:
            return False
        names = " + ".join(self.cluster.pools[pool].chip.name for pool in chain(*arrangement))
        self.ledger.considered += 1
        if least_s == inf:
            self.ledger.pruned.add("memory", f"{names}: {UNMADE['memory']}")
        else:
            words = f"{names}: at best {least_s:.4g} s, another takes {self.cutoff:.4g} s"
            self.ledger.pruned.add("bound", words, 1, least_s)
        return True

    def _alone(self, group: Group, *, brief: bool, longer: bool) -> None:
        times = ALONE if len(group.pools) == 1 and not brief else 1
        if longer:
            times = THROUGH * len(group.pools) // 2
        known = len(group.found)
        group.best(
            self.samples,
            self.cutoff,
            effort=times * self.options.effort,
            nearly=NEARLY if self._refines_many else 1.0,
            uncut=0 if longer else UNCUT,
            looks=BRIEF_FIRST if longer else WHOLE,
        )
        for timed in group.found[known:]:
            self._add([timed])

    def _chips_of(self, arrangement: Arrangement) -> ClusterView:
        return ClusterView(tuple(self.cluster.pools[pool] for pool in chain(*arrangement)))

    def _sites_of(self, arrangement: Arrangement) -> tuple[int, ...]:
        """Where those may be that hold the same, as ``Group`` has it: of one pipeline, each is at
        one site."""
        if len(arrangement) == 1:
            return ()
        return count_by_level(self.cluster.pools[pool].site for pool in chain(*arrangement))

    def _every_kept(self, *, domains: bool) -> Iterator[Kept]:
        """Ways in which pipelines side by side keep what they hold."""
        every: list[Apart] = ["", "pipelines"] if domains else [""]
        for apart, level in product(every, sorted(self.options.zero, reverse=True)):
            if level < 3 or apart:
                yield Kept(apart, level)

    def _allowed(self, arrangement: Arrangement) -> bool:
        """Options leave it open which pools go together so."""
        options = self.options
        if options.max_pipelines is not None and len(arrangement) > options.max_pipelines:
            return False
        kinds = ({self.cluster.pools[pool].chip.name for pool in pools} for pools in arrangement)
        return options.unlike_stages or all(len(names) == 1 for names in kinds)

    def _is_open(self, lines: Sequence[Line]) -> bool:
        """Options leave such pipelines open."""
        arrangement, options = arrangement_of(lines), self.options
        if options.only_runnable and why_never_run(self.cluster, arrangement):
            return False
        return self._allowed(arrangement) and all(is_open(line, options) for line in lines)

    def look_at_cut(self, cluster: ClusterView, first: int) -> None:
        """The same chips with a pool in two parts, ``first`` and the next, where both are used."""
        with self._beside(self.problem.on(cluster)) as other:
            for arrangement in arrangements(len(cluster.pools), self.options):
                if {first, first + 1} <= {pool for group in arrangement for pool in group}:
                    other.look_at(arrangement)

    def distinct(self) -> list[Lines]:
        """The best, and the next that are really different from all before them."""
        found: dict[object, Lines] = {}
        for lines in sorted(self._found, key=_step_s):
            found.setdefault(lines.likeness, lines)
        return list(found.values())

    def lists(self) -> list[list[Lines]]:
        """The best few; and of each part of the chips that by itself is nearly as fast what would
        be its best few: refined, they may be faster."""
        every = self.distinct()
        found = [every[: MOST_OTHERS + 1]] if every else []
        pools = range(len(self.cluster.pools))
        for number in range(1, len(pools) if every else 0):
            for part in map(set, combinations(pools, number)):
                own = (lines for lines in every if lines.uses(part, self.cluster))
                best = [o for o in islice(own, BEST_FEW) if o.seconds < WORTH_A_LOOK * self.cutoff]
                known = [lines for few in found for lines in few[:BEST_FEW]]
                found.append([lines for lines in best if lines not in known])
        return list(filter(None, found))

    @property
    def _refines_many(self) -> bool:
        """Where something is left open that is only tried for the best few."""
        asked = self.options
        left = asked.in_flight, asked.mixed_recompute, asked.cuts_layers, asked.divides_heads
        return self.has_time and any(left)

    def near(self, known: Sequence[Lines] = ()) -> list[Lines]:
        """The best, and those that are not much slower, however alike: refined, they may be faster.
        None that is ``known``."""
        if not self._refines_many:
            return []
        least = sorted(self._found, key=_step_s)[:MOST_NEAR]
        within = NEAR * self.cutoff
        return [lines for lines in least if lines.seconds < within and lines not in known]

    def candidate(self, lines: Lines) -> Candidate:
        """With the plan, and its time and memory as users see them: its ranks are counted in the
        order of the cluster's pools."""
        plan = plan_of(lines.lines, self.problem.on(lines.cluster))
        every = [section for line in lines.lines for section in line.sections]
        pools = [s.pool for s in every for _ in used_parts(lines.cluster.pools[s.pool], s)]
        order = sorted(range(len(pools)), key=pools.__getitem__)
        plan, used = ordered(plan, used_cluster(lines.lines, lines.cluster), order)
        there = self.problem.on(used)
        return Candidate(
            name=name_of(plan, there.cluster),
            plan=plan,
            cluster=there.cluster,
            time=there.time(plan),
            memory=there.memory(plan),
        )

    def _add(self, chosen: Sequence[Timed]) -> None:
        lines = tuple(timed.line for timed in chosen)
        stretch = self.problem.knowledge.stretch(sum(line.num_chips for line in lines))
        totals_s = self.problem.knowledge.totals_s(used_cluster(lines, self.cluster))
        seconds = stretch * (totals_s + max(timed.seconds for timed in chosen))
        self._found.append(Lines(seconds, lines, self.cluster))
        self.ledger.best_s = min(self.ledger.best_s, seconds)

    def _side_by_side(self, groups: Sequence[Group], kept: Kept) -> None:
        times = WORTH_SHOWING if self.has_time else WORTH_SHARING
        times = 1 if kept.apart else times
        worth = inf if self.has_few_chips else times * self.cutoff
        least = self.relaxed.per_sample_s if self.relaxed else lambda _: 0.0
        pools = [group.pools for group in groups]
        weights, least_s = [*map(self._speed, pools)], [*map(least, pools)]
        beside = Beside(groups, weights, least_s, kept, self._missed)
        for timed in shared(beside, self.samples, lambda: times * self.cutoff, worth):
            self._add(timed)

    def _speed(self, pools: Sequence[int]) -> int:
        """Of all chips of a group together, to begin with."""
        own = [self.cluster.pools[number] for number in pools]
        return max(1, round(sum(pool.num_chips * pool.chip.product_flops / 1e12 for pool in own)))


NEARLY = 1.2
"""Times the best step, up to which pipelines are looked for where many plans are refined."""
NEAR, MOST_NEAR = 1.35, 400
"""Times the best step, up to which a plan that is refined may be the fastest; so many at most."""
WORTH_A_LOOK = 1.25
"""Arrangements are looked at again whose best takes up to this many times the best of all."""
WORTH_SHOWING = 1.25
"""Pipelines side by side are looked for up to this many times the best step."""
WORTH_SHARING = 1.1
"""Likewise of many chips, where there is time only for those that may end first with other
shares."""


_step_s = attrgetter("seconds")


def _united(arrangement: Arrangement) -> tuple[int, int]:
    """Those of few pools together first, and of these those that use most."""
    sizes = [*map(len, arrangement)]
    return max(sizes), -sum(sizes)
