"""Keep no more activations than the configuration allows: what costs least is computed again."""

from __future__ import annotations

from collections.abc import Collection

from weft.config.errors import ConfigError
from weft.cost.choice import choice_of
from weft.cost.memory import memory_of_plan
from weft.cost.rates import Roofline, compute_seconds
from weft.cost.work import Training
from weft.models.registry import shape_of
from weft.models.shape import ModelShape
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan
from weft.planner.search.again import Where, lightest

ACTIVATIONS = "compute.activations_gib"
USUAL = Roofline(
    flops_s=4e14, fp8_flops_s=8e14, fp32_flops_s=5e13, attention_flops_s=3e14, bytes_s=2.5e12
)
"""Rates that tell one operation from another. Not those of the chips here: every rank must come to
the same plan."""


def with_activations_in(
    plan: Plan,
    gib: float,
    spec: ModelSpec,
    seq_len: int,
    *,
    training: Training,
    places: Collection[Where],
) -> Plan:
    """The plan whose ranks keep no more than that of their microbatches, at these positions.

    Each takes the modes of recomputation, and the number of layers made again as a whole, that take
    least time among those with which it does.

    Raises:
        ConfigError: it is too little even where only what enters each layer is kept.
    """
    shape = shape_of(spec)

    def kept(asked: Plan) -> dict[Where, float]:
        memory = memory_of_plan(asked, spec, seq_len, training=training)
        return {
            (p, position): max(
                memory[rank].activations for rank in pipeline.stages[numbers[0]].mesh.ranks
            )
            for p, pipeline in enumerate(asked.pipelines)
            for position, numbers in enumerate(pipeline.positions())
        }

    def fits(asked: Plan) -> dict[Where, bool]:
        return {where: found <= gib * 2**30 for where, found in kept(asked).items()}

    def seconds(asked: Plan) -> dict[Where, float]:
        return {
            (p, position): sum(_seconds(asked, p, number, shape, seq_len) for number in numbers)
            for p, pipeline in enumerate(asked.pipelines)
            for position, numbers in enumerate(pipeline.positions())
        }

    found = lightest(plan, list(places), fits, seconds)
    taken = kept(found)
    p, position = max(taken, key=lambda where: taken[where])
    least = taken[p, position] / 2**30
    if least > gib:
        hint = "Smaller micro-batches (batch.micro) or shorter samples (data.seq_len) keep less."
        why = "where all its layers are computed again"
        if (p, position) not in places:
            why = "as its `recompute` says"
        expected = f"at least {least:.3g}, what pipeline {p} keeps at position {position} {why}"
        raise ConfigError(ACTIVATIONS, gib, expected, hint)
    return found


def _seconds(plan: Plan, number: int, stage: int, shape: ModelShape, seq_len: int) -> float:
    """Of a microbatch in one stage of a pipeline."""
    choice = choice_of(plan.pipelines[number], stage, seq_len)
    return choice.passes * compute_seconds(shape, choice.work, USUAL).whole_s
