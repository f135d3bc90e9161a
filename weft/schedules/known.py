"""Schedules by shape, proven once: a search asks about the same few thousands of times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from weft.plan.plan import PipelinePlan, ScheduleName
from weft.schedules.action import Action, Schedule
from weft.schedules.registry import SCHEDULES, actions_of, head_positions, placed
from weft.schedules.validity import prove


@dataclass(frozen=True, slots=True)
class Pattern:
    """All that a schedule depends on."""

    name: ScheduleName
    num_positions: int
    num_stages: int
    """That follow one another."""
    num_microbatches: int
    in_flight: tuple[int, ...] = ()
    """As ``PipelinePlan`` has it."""
    lists: tuple[str, ...] = ()
    """Likewise."""
    heads: tuple[int, ...] = ()
    """At which position each part of the head is."""

    @staticmethod
    def of(pipeline: PipelinePlan) -> Pattern:
        """Of a planned pipeline whose stages are where its schedule wants them."""
        return Pattern(
            pipeline.schedule,
            len(pipeline.positions()),
            pipeline.num_chained,
            pipeline.num_microbatches,
            pipeline.in_flight,
            pipeline.lists,
            head_positions(pipeline),
        )

    @property
    def together(self) -> int:
        """Microbatches that are on their way down and back at once, about."""
        return max(self.num_positions, *self.in_flight, 0)

    @property
    def positions(self) -> list[tuple[int, ...]]:
        """The stages that each position holds."""
        return placed(self.name, self.num_positions, self.num_stages, self.heads)


@lru_cache(maxsize=8)
def schedule_of_pattern(pattern: Pattern) -> Schedule:
    """Kept for a moment: what is held at its peak is asked before it is played."""
    shape = pattern.num_positions, pattern.num_stages, pattern.num_microbatches
    return actions_of(
        pattern.name,
        *shape,
        in_flight=pattern.in_flight,
        lists=pattern.lists,
        heads=pattern.heads,
    )


@lru_cache(maxsize=8)
def proven_order(pattern: Pattern) -> tuple[Action, ...]:
    """One order in which all actions can be done one after the other, from the proof that the
    schedule ends and does everything once. Few are kept: long ones hold 10^5 actions."""
    schedule = schedule_of_pattern(pattern)
    many, heads = pattern.num_microbatches, len(pattern.heads)
    return prove(schedule, pattern.positions, many, heads=heads)


def full_after(pattern: Pattern) -> int:
    """Microbatches with which its pipeline is full, however many follow."""
    return pattern.num_stages + len(pattern.heads) + 3 + max(pattern.in_flight, default=0)


@lru_cache(maxsize=1 << 14)
def held_at_peak(pattern: Pattern) -> tuple[tuple[int, ...], ...]:
    """For every position, how many microbatches each of its stages holds at the position's peak.

    The peak is where the counts together are largest; unlike stages of one position may peak a
    little later. Once the pipeline is full, further microbatches change nothing, but where a
    schedule holds them all.
    """
    grows = SCHEDULES[pattern.name].holds_every_microbatch
    if grows and not (pattern.lists or pattern.heads):
        return ((pattern.num_microbatches,),) * pattern.num_positions
    full = full_after(pattern)
    if pattern.num_microbatches > full and not (grows or pattern.lists):
        return held_at_peak(replace(pattern, num_microbatches=full))
    lists = zip(schedule_of_pattern(pattern), pattern.positions, strict=True)
    return tuple(_peak(actions, held, {"F": 1, "B": -1, "W": -1}) for actions, held in lists)


@lru_cache(maxsize=1 << 10)
def waiting_at_peak(pattern: Pattern) -> tuple[tuple[int, ...], ...]:
    """Likewise, of how many microbatches the weight gradients wait."""
    full = full_after(pattern)
    if pattern.num_microbatches > full and not pattern.lists:
        return waiting_at_peak(replace(pattern, num_microbatches=full))
    lists = zip(schedule_of_pattern(pattern), pattern.positions, strict=True)
    return tuple(_peak(actions, held, {"I": 1, "W": -1}) for actions, held in lists)


def _peak(
    actions: Sequence[Action], stages: Sequence[int], changes: Mapping[str, int]
) -> tuple[int, ...]:
    now = dict.fromkeys(stages, 0)
    best, total, most = tuple(now.values()), 0, 0
    for action in actions:
        change = changes.get(action.kind, 0)
        now[action.stage] += change
        total += change
        if total > most:
            best, most = tuple(now.values()), total
    return best
