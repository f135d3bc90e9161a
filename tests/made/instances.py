"""Pipelines drawn at random, with unlike stages, borders and memory."""

import random

from schedules.test_schedules import pipeline

from weft.cost.times import BorderTimes, StageTimes
from weft.schedules.registry import SCHEDULES
from weft.simulate.made.make import Making

SHAPES = ("1f1b", "1f1b", "interleaved", "zb-v")


def drawn(seed: int, *, positions: int, most: int, shapes: tuple[str, ...] = SHAPES) -> Making:
    """Of up to so many positions and microbatches, in whole numbers of time."""
    rng = random.Random(seed)
    name = rng.choice(shapes)
    plan = pipeline(name, rng.randint(2, positions), rng.randint(1, most))
    stages = [
        StageTimes(
            forward_s=rng.randint(5, 50),
            input_grad_s=rng.randint(5, 50),
            weight_grad_s=rng.randint(5, 50),
        )
        for _ in plan.stages
    ]
    borders = [
        BorderTimes(
            transfer_s=rng.choice([0, rng.randint(0, 40)]),
            latency_s=rng.choice([0, rng.randint(0, 40)]),
            is_shared=rng.random() < 0.5,
        )
        for _ in plan.stages[1:]
    ]
    chunks = len(plan.positions()[0])
    room = tuple(
        rng.randint(chunks, chunks * (plan.num_microbatches + 2)) for _ in plan.positions()
    )
    return Making(pipeline=plan, stages=stages, borders=borders, room=room, names=tuple(SCHEDULES))
