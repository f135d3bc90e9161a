"""Which rank has which expert: by their loads, where a plan says so, and what it must say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import floor, inf
from statistics import fmean

from weft.axes.registry import AXES
from weft.config.errors import ConfigError
from weft.models.registry import param_specs
from weft.plan.layout import EXPERTS, At, Dim, places_at
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan, StagePlan

AXIS = next(name for name, axis in AXES.items() if axis.near_key == "expert_ways")
"""The one that divides experts."""
LEAST_GAIN = 0.05
"""Part of the time of the slowest place that a move of experts has to save, in the mean of layers:
experts that change places for less would do so for ever."""

Places = tuple[At, ...]
Loads = Mapping[int, Sequence[int]]
"""By layer, tokens that went to each expert."""


def refuse_wrong_places(plan: Plan, spec: ModelSpec) -> None:
    """
    Raises:
        ConfigError: a stage does not say of each expert of its layers at which place it is.
    """
    counts = _counts(spec)
    for p, s, stage in plan.stages():
        if not stage.expert_places:
            continue
        key, ways = f"pipelines[{p}].stages[{s}].expert_places", stage.mesh.size(AXIS)
        said, wanted = stage.expert_places, [counts.get(layer, 0) for layer in stage.blocks]
        if ways == 1:
            hint = "All ranks of this stage have all of its experts."
            raise ConfigError(key, said, f"nothing where {AXIS} is 1", hint)
        _refuse_copies(key, stage)
        if [*map(len, said)] != wanted:
            expected = f"one place for each expert of its layers, {wanted} of them"
            raise ConfigError(key, said, expected)
        for places in filter(None, said):
            _refuse_places(key, said, places, ways)


def _refuse_places(key: str, said: object, places: Places, ways: int) -> None:
    """Of the experts of one layer."""
    every = [place for at in places for place in places_at(at)]
    twice = any(len({*places_at(at)}) < len(places_at(at)) for at in places)
    is_wrong = twice or () in places or not all(type(place) is int for place in every)
    if is_wrong or {*every} != {*range(ways)}:
        hint = "A rank without an expert would have nothing to do for the others."
        expected = f"each of the places 0 to {ways - 1} at least once in each layer"
        raise ConfigError(key, said, expected, hint)


def _refuse_copies(key: str, stage: StagePlan) -> None:
    has_copies = any(isinstance(at, tuple) for places in stage.expert_places for at in places)
    if has_copies and stage.param_tier != "device":
        hint = "What one rank has comes alone, and copies of it with others."
        expected = "one place for each expert where parameters wait elsewhere (param_tier)"
        raise ConfigError(key, stage.expert_places, expected, hint)


def refuse_idle_moves(plan: Plan, *, copies: int = 0) -> None:
    """``copies``: as ``with_places`` has them.

    Raises:
        ConfigError: experts are to change places, and no stage has several; or to be copied where
            nothing is.
    """
    for _, _, stage in plan.stages():
        if copies and stage.mesh.size(AXIS) > 1 and stage.param_tier != "device":
            expected = "0 where parameters wait elsewhere (param_tier)"
            raise ConfigError("move_experts.replicate", copies, expected)
    if not any(stage.mesh.size(AXIS) > 1 for _, _, stage in plan.stages()):
        hint = f"No stage divides experts: {AXIS} of a stage does."
        raise ConfigError("move_experts", "a section", "null", hint)


def with_places(
    plan: Plan, spec: ModelSpec, loads: Loads, paces: Sequence[float] = (), *, copies: int = 0
) -> Plan:
    """The plan in which no place along the axis of experts has more to do than it must; itself
    where that would save too little.

    Experts of a layer change places in pairs, the pair that helps most first, as long as one helps:
    so each place has as many as before, and few move.

    Args:
        loads: Tokens by layer and expert, of some steps.
        paces: By rank, how many times as long it computes as others; empty: all alike.
        copies: Of a layer's experts, that places may have beside one of each: where no exchange
            helps, of the expert that helps most.
    """
    return plan.each(lambda stage: _moved(stage, spec, loads, paces, copies))


def slowest_part(plan: Plan, spec: ModelSpec, loads: Loads, paces: Sequence[float] = ()) -> float:
    """Of the slowest place, over the mean of all, in the stage where that is most: 1 is even."""
    found = [1.0]
    for _, _, stage in plan.stages():
        by_place = _paces(stage, paces)
        layers = [
            (loads[layer], places)
            for layer, places in zip(stage.blocks, places_of(stage, spec), strict=True)
            if layer in loads and places
        ]
        slowest = sum(time_of(*layer, by_place) for layer in layers)
        mean = sum(fmean(_by_place(*layer, by_place)) for layer in layers)
        found.append(slowest / mean if mean else 1.0)
    return max(found)


def time_of(load: Sequence[int], places: Places, paces: Sequence[float]) -> float:
    """Of the slowest place in one layer, in tokens of a rank of pace 1."""
    return max(_by_place(load, places, paces))


def places_of(stage: StagePlan, spec: ModelSpec) -> tuple[Places, ...]:
    """Of each layer's experts where they are now."""
    if stage.expert_places:
        return stage.expert_places
    ways, counts = stage.mesh.size(AXIS), _counts(spec)

    def usual(count: int) -> Places:
        dim = Dim(name=EXPERTS, size=count)
        parts = [
            AXES[AXIS].part(dim, ways, place, stage.mesh.shares(AXIS)) for place in range(ways)
        ]
        found = {e: place for place, part in enumerate(parts) for each in part for e in each}
        return tuple(found[expert] for expert in range(count))

    return tuple(usual(counts[layer]) if layer in counts else () for layer in stage.blocks)


def _moved(
    stage: StagePlan, spec: ModelSpec, loads: Loads, paces: Sequence[float], copies: int
) -> StagePlan:
    if stage.mesh.size(AXIS) == 1:
        return stage
    by_place = _paces(stage, paces)
    before = places_of(stage, spec)
    of_layers = [loads.get(layer, ()) for layer in stage.blocks]
    both = list(zip(of_layers, before, strict=True))
    after = tuple(
        _copied(load, _swapped(load, now, by_place), by_place, copies) if load else now
        for load, now in both
    )
    then = zip(of_layers, after, strict=True)
    was = sum(time_of(load, places, by_place) for load, places in both if load)
    will = sum(time_of(load, places, by_place) for load, places in then if load)
    return replace(stage, expert_places=after) if will < (1 - LEAST_GAIN) * was else stage


def _paces(stage: StagePlan, paces: Sequence[float]) -> list[float]:
    """By place along the axis, that of the slowest of its ranks."""
    found = [0.0] * stage.mesh.size(AXIS)
    for rank in stage.mesh.ranks:
        place = stage.mesh.coordinate(rank)[AXIS]
        found[place] = max(found[place], paces[rank] if paces else 1.0)
    return found


def _by_place(load: Sequence[int], places: Places, paces: Sequence[float]) -> list[float]:
    found = [0.0] * len(paces)
    for tokens, at in zip(load, places, strict=True):
        having = places_at(at)
        for place in having:
            found[place] += tokens / len(having) * paces[place]
    return found


def _with_one_more(places: Sequence[At], slowest: int, ways: int) -> Iterator[tuple[int, At]]:
    """Of experts of the slowest place, where they would be with a further copy."""
    for expert, at in enumerate(places):
        having = places_at(at)
        elsewhere = {*range(ways)} - {*having} if slowest in having else set()
        yield from ((expert, tuple(sorted((*having, place)))) for place in elsewhere)


def _copied(load: Sequence[int], places: Places, paces: Sequence[float], copies: int) -> Places:
    """With further copies of experts of the slowest place at others, as long as each saves what a
    move has to."""
    now = list(places)
    for _ in range(copies):
        times = _by_place(load, tuple(now), paces)
        slowest = max(range(len(paces)), key=times.__getitem__)
        tried = (
            (time_of(load, (*now[:expert], at, *now[expert + 1 :]), paces), expert, at)
            for expert, at in _with_one_more(now, slowest, len(paces))
        )
        least, expert, more = min(tried, default=(inf, 0, ()))
        if least > (1 - LEAST_GAIN) * times[slowest]:
            break
        now[expert] = more
    return tuple(now)


def _swapped(load: Sequence[int], places: Places, paces: Sequence[float]) -> Places:
    """As long as the slowest place gets faster by an exchange with another, and none as slow. Of
    what several have one copy stays."""
    now = _without_copies(places)
    while True:
        times = _by_place(load, tuple(now), paces)
        slowest = max(range(len(paces)), key=times.__getitem__)
        best, pair = times[slowest], None
        mine = [expert for expert, place in enumerate(now) if place == slowest]
        others = [expert for expert, place in enumerate(now) if place != slowest]
        for a, b in product(mine, others):
            more = load[b] - load[a]
            here = times[slowest] + more * paces[slowest]
            there = times[now[b]] - more * paces[now[b]]
            if max(here, there) < best:
                best, pair = max(here, there), (a, b)
        if pair is None:
            return tuple(now)
        a, b = pair
        now[a], now[b] = now[b], now[a]


def _without_copies(places: Places) -> list[int]:
    """One place each, of those that have an expert the one that has fewest."""
    many = Counter(places_at(at)[0] for at in places if len(places_at(at)) == 1)
    now = []
    for at in places:
        place = min(places_at(at), key=lambda each: (many[each], each))
        many[place] += len(places_at(at)) > 1
        now.append(place)
    return now


def _counts(spec: ModelSpec) -> dict[int, int]:
    """By layer, how many experts it has."""
    params = [param for param in param_specs(spec) if param.of_experts]
    return {floor(p.unit): p.shape[0] for p in params if not isinstance(p.unit, str)}
