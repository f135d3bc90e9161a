"""The best few plans of a search, each as fast as what it leaves open lets it be.

Borders inside layers, what is computed again and more microbatches in flight all want the same
memory. So each is tried alone and with the others, and what is fastest in the end is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import TypeVar

from weft.cluster.view import ClusterView
from weft.plan.plan import Plan
from weft.planner.problem import Problem
from weft.planner.search.again import ALL, with_least_recompute
from weft.planner.search.finer import with_finer_borders
from weft.planner.search.found import Candidate
from weft.planner.search.heads import with_head_parts
from weft.planner.search.orders import with_made_orders
from weft.schedules.registry import SCHEDULES
from weft.simulate.made.least import least_s
from weft.simulate.made.make import Making

_Each = TypeVar("_Each")
_Refine = Callable[[Sequence[Candidate], Problem], Iterable[Candidate]]

BEST_FEW = 3
"""Plans of each list for which everything is tried: those that are fastest with the usual order,
and those that are so with as many microbatches in flight as is best for them."""
MOST_PROMISING = 48
"""Others: those that could be fastest in some order. A plan that is a sixth slower in the usual
order may be the fastest in the end."""
MOST_ALIKE = 24
"""Then others on the meshes of the best: with another schedule, or other things computed again."""
MOST_BARE = 16
"""Of these, and of others that are refined: those that keep next to nothing at first, whatever they
would take so."""


def refined(
    lists: Sequence[Sequence[Candidate]],
    problem: Problem,
    near: Iterable[Candidate] = (),
    goes_on: Callable[[], bool] = lambda: True,
) -> list[Candidate]:
    """Of all lists together, each plan once, the fastest first.

    Args:
        near: Others, of which everything is tried for the most promising.
        goes_on: Somebody waits for more. Else what is first is refined alone.
    """
    some = _Some(problem, goes_on)
    promising = some.by_promise(near)
    found = [candidate for few in lists for candidate in few]
    found += some.variants(lists, promising[:MOST_PROMISING])
    if others := promising[MOST_PROMISING:]:
        fastest = min(found, key=_step_s)
        meshes = _meshes(fastest)
        alike = [each for each in others if _meshes(each) == meshes]
        found += some.variants([], alike[:MOST_ALIKE], _step_s(fastest))
    best: dict[object, Candidate] = {}
    for candidate in sorted(found, key=_step_s):
        best.setdefault(_likeness(candidate), candidate)
    most = max(map(len, lists), default=0)
    return list(best.values())[:most]


@dataclass(frozen=True, slots=True)
class _Some:
    """Refines as many as somebody waits for."""

    problem: Problem
    goes_on: Callable[[], bool]
    _cut: dict[Plan, list[tuple[ClusterView, Candidate]]] = field(default_factory=dict)
    """By plan, on whichever chips, what it is with borders inside layers: all are asked for as what
    is promising, and some again as what is refined."""

    def of(self, every: Iterable[_Each]) -> Iterator[_Each]:
        """The first, and the others as long as somebody waits."""
        for number, each in enumerate(every):
            if number and not self.goes_on():
                return
            yield each

    def each(self, every: Iterable[Candidate], refine: _Refine) -> Iterator[Candidate]:
        """As many, refined."""
        return (found for one in self.of(every) for found in refine([one], self.problem))

    def cut(self, every: Iterable[Candidate]) -> Iterator[Candidate]:
        """As many, with borders inside layers."""
        for one in self.of(every):
            known = self._cut.setdefault(one.plan, [])
            found = [after for cluster, after in known if cluster == one.cluster]
            if not found:
                found = with_finer_borders([one], self.problem)
                known += [(one.cluster, after) for after in found]
            yield from found

    def variants(
        self,
        lists: Sequence[Sequence[Candidate]],
        promising: Sequence[Candidate],
        least: float = inf,
    ) -> Iterator[Candidate]:
        """Of all with numbers in flight, and of the best few and those that promise much, with an
        order made for each that could be the fastest of all, and faster than ``least``."""
        few, problem = list[Candidate](), self.problem
        for found in self.of(lists):
            deeper = [with_made_orders(each, problem, lists=False) for each in self.of(found)]
            yield from deeper
            few += [*found[:BEST_FEW], *sorted(deeper, key=_step_s)[:BEST_FEW]]
            least = min([least, *map(_step_s, deeper)])
        few = _each_once([*few, *promising])
        few = _each_once([*few, *self._with_room(few, least)])
        both = _each_once([*few, *self.cut(few)])
        yield from self.each(few, with_head_parts)
        lighter = [*self.each(both, with_least_recompute)]
        every = self.of(_each_once([*both, *lighter]))
        floors = [(_floor_s(each, problem), each) for each in every]
        for floor_s, candidate in self.of(sorted(floors, key=lambda both: both[0])):
            if floor_s < least:
                made = with_made_orders(candidate, problem)
                least = min(least, made.time.step_s)
                yield made

    def by_promise(self, near: Iterable[Candidate]) -> list[Candidate]:
        """All, and all with borders inside layers, which may be what makes one fast; what could be
        fastest first."""
        every = _each_once([*self.of(near)])
        both = self.of(_each_once([*every, *self.cut(every)]))
        floors = [(_floor_s(each, self.problem), each) for each in both]
        return [each for _, each in sorted(floors, key=lambda both: both[0])]

    def _with_room(self, few: Sequence[Candidate], least: float) -> list[Candidate]:
        """The most promising, and others that could be the fastest so, keep next to nothing, for
        then more microbatches are in flight; what there is room for after that is kept again."""
        problem = self.problem
        if not problem.options.mixed_recompute:
            return []
        promising = sorted(few, key=partial(_floor_s, problem=problem))
        again = _each_once([_all_again(each, problem) for each in self.of(promising)])
        both = enumerate(again)
        bare = [each for n, each in both if n < MOST_BARE or _floor_s(each, problem) < least]
        return [with_made_orders(each, problem, lists=False) for each in self.of(bare)]


def _all_again(candidate: Candidate, problem: Problem) -> Candidate:
    plan = candidate.plan.each(lambda stage: replace(stage, recompute=ALL))
    there = problem.on(candidate.cluster)
    return replace(candidate, plan=plan, time=there.time(plan), memory=there.memory(plan))


def _each_once(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of each plan the first on the same chips: on others it is another."""
    found, clusters = list[Candidate](), dict[Plan, list[ClusterView]]()
    for candidate in candidates:
        known = clusters.setdefault(candidate.plan, [])
        if candidate.cluster not in known:
            known.append(candidate.cluster)
            found.append(candidate)
    return found


def _floor_s(candidate: Candidate, problem: Problem) -> float:
    """A step takes at least as long in whatever order, and then what is done once."""
    plan, time = candidate.plan, candidate.time
    every = zip(plan.pipelines, problem.on(candidate.cluster).times(plan), strict=True)
    names = problem.options.schedules
    split = any(SCHEDULES[name].splits_backward for name in names)
    floors = []
    for line, (stages, borders) in every:
        room = tuple(line.num_microbatches * len(held) for held in line.positions())
        making = Making(pipeline=line, stages=stages, borders=borders, room=room, names=names)
        floors.append(least_s(making.shop(room, split=split).tables()))
    return time.stretch * max(sum(both) for both in zip(floors, time.once_s, strict=True))


def _likeness(candidate: Candidate) -> object:
    """Equal for plans that a person would call the same."""
    return candidate.name, tuple(pipeline.schedule for pipeline in candidate.plan.pipelines)


def _meshes(candidate: Candidate) -> object:
    """Equal for plans on the same chips in the same meshes."""
    lines = [[stage.mesh for stage in line.stages] for line in candidate.plan.pipelines]
    return candidate.cluster, [[(mesh.ranks, mesh.axes) for mesh in line] for line in lines]


def _step_s(candidate: Candidate) -> float:
    return candidate.time.step_s
