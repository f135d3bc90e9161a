"""Samples for each pipeline by how fast it was: the plan stays, and so do its numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from weft.config.errors import ConfigError
from weft.plan.plan import Plan
from weft.plan.tiling import split_by_weight
from weft.schedules.registry import SCHEDULES

LEAST_SAVING = 0.01
"""Part of the slowest pipeline's time that other shares have to save."""
GRAIN = 10_000
"""Speeds in whole numbers: to a hundredth of a percent of the fastest."""


def balanced(plan: Plan, seconds: Sequence[float]) -> Plan:
    """The plan with samples by speed, to a single one: the last micro-batch of each pipeline has
    what is left. The same where that saves next to nothing.

    Args:
        seconds: That each pipeline took for its samples, without waiting for others.
    """
    both = zip(plan.pipelines, seconds, strict=True)
    each = [pipeline.samples / took if pipeline.samples else 0.0 for pipeline, took in both]
    # All ranks keep some, and as many micro-batches as are to be in flight.
    under_way = [max(p.in_flight, default=1) * p.microbatch for p in plan.pipelines]
    least = [min(p.samples, most) for p, most in zip(plan.pipelines, under_way, strict=True)]
    weights = [max(round(GRAIN * speed / max(each)), 1) if speed else 0 for speed in each]
    shares = _above(split_by_weight(plan.global_batch, weights), least)
    after = max(share / speed for share, speed in zip(shares, each, strict=True) if speed)
    if after > (1 - LEAST_SAVING) * max(seconds):
        return plan
    return with_shares(plan, shares)


def _above(shares: Sequence[int], least: Sequence[int]) -> list[int]:
    """The nearest numbers of the same sum that are no less than these."""
    found = [max(share, low) for share, low in zip(shares, least, strict=True)]
    for _ in range(sum(found) - sum(shares)):
        spare = [share - low for share, low in zip(found, least, strict=True)]
        found[spare.index(max(spare))] -= 1
    return found


def with_shares(plan: Plan, samples: Sequence[int]) -> Plan:
    """The same with other samples for each pipeline."""
    both = zip(plan.pipelines, samples, strict=True)
    return replace(plan, pipelines=tuple(replace(p, samples=many) for p, many in both))


def as_in(plan: Plan, other: Plan) -> Plan:
    """The same with the samples of another's pipelines, and with the orders made for them."""
    return replace(
        plan,
        pipelines=tuple(
            replace(
                p,
                samples=theirs.samples,
                schedule=theirs.schedule,
                in_flight=theirs.in_flight,
                lists=theirs.lists,
            )
            for p, theirs in zip(plan.pipelines, other.pipelines, strict=True)
        ),
    )


def shares_in_force(plan: Plan, saved: object) -> Plan:
    """The plan with the samples that a checkpoint's has, and with the lists that were made for
    them, where nothing else of it is another."""
    try:
        before = Plan.from_json(json.dumps(saved))
    except (AttributeError, KeyError, TypeError, ValueError):  # another version's
        return plan
    samples = [pipeline.samples for pipeline in before.pipelines]
    if len(samples) != len(plan.pipelines) or sum(samples) != plan.global_batch:
        return plan
    found = with_shares(plan, samples)
    both = zip(found.pipelines, before.pipelines, strict=True)
    made = tuple(theirs if mine.lists else mine for mine, theirs in both)
    found = as_in(found, replace(found, pipelines=made))
    return found if found == before else plan


def refuse_unbalanced(plan: Plan) -> None:
    """``balance`` has pipelines to balance, whose samples may change.

    Raises:
        ConfigError: it has not.
    """
    key, value = "balance", "a section"
    if len(plan.pipelines) == 1:
        hint = "There is one pipeline, and nobody to give samples to."
        raise ConfigError(key, value, "null", hint)
    if plan.sites:
        raise ConfigError(key, value, "null with sites", "Numbers would depend on chips' speed.")
    for p, pipeline in enumerate(plan.pipelines):
        several = len(pipeline.positions()) > 1
        if pipeline.lists and pipeline.heads:
            hint = (
                f"Those of pipelines[{p}] are for {pipeline.num_microbatches} micro-batches, and "
            )
            hint += "none are made for parts of the head: leave lists out."
            raise ConfigError(key, value, "null with lists for parts of the head", hint)
        if any(stage.zero == 3 and stage.passes > 1 for stage in pipeline.stages):
            hint = f"Ranks of pipelines[{p}] would gather for unlike numbers of passes in a last "
            hint += "micro-batch of few samples: passes=1, or zero=2."
            raise ConfigError(key, value, "null with passes of zero 3", hint)
        if several and SCHEDULES[pipeline.schedule].holds_every_microbatch:
            hint = f"pipelines[{p}] would hold more of them than was planned: use 1f1b."
            raise ConfigError(key, value, f"null with the schedule {pipeline.schedule}", hint)
