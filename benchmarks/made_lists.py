"""Lists made for drawn pipelines: are they right, how far from the best, how much they save.

``python -m benchmarks.made_lists [--instances 10000] [--small 500]``; ratios of played times alone,
so any machine will do.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from made.exhaustive import small_of
from made.instances import drawn
from schedules.test_schedules import pipeline

from weft.cost.times import BorderTimes, StageTimes
from weft.schedules.known import Pattern, held_at_peak, proven_order
from weft.schedules.registry import SCHEDULES
from weft.simulate.made.make import WORTH, Making, make

BUDGET = 600
"""Of drawn instances; those of a few microbatches are searched in full."""
NOTHING = 1e-9


def main() -> None:
    """Everything, in a few lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=10_000)
    parser.add_argument("--small", type=int, default=500)
    asked = parser.parse_args()
    instances = (drawn(seed, positions=4, most=8) for seed in range(asked.instances))
    gains = [gain(replace(each, budget=BUDGET)) for each in instances]
    told = [each for each in gains if each is not None]
    print(
        f"{len(gains)} instances end and keep to the room; a name fits {len(told)}, of which none"
    )
    print(
        f"saves a thousandth; lists are {mean(told):.3f} times as fast as the best one, on average"
    )
    small = (drawn(seed, positions=3, most=4, shapes=("1f1b",)) for seed in range(asked.small))
    far = [distance(each) for each in small]
    print(f"{len(far)} small ones are longer than the best of all orders by {mean(far):.4%} on")
    print(f"average, by {max(far):.3%} at worst")
    for words, making in CASES.items():
        print(f"{words}: {ratios(making)}")


def ratios(making: Making) -> str:
    """How many times as long names take."""
    usual = making.seconds(making.pipeline)
    plain = (replace(making.pipeline, schedule=name) for name in making.alike())
    best = min(making.seconds(each) for each in plain if making.fits(each))
    whole = making.seconds(make(replace(making, names=("1f1b", "gpipe"))))
    halves = making.seconds(make(making))
    return (
        f"1f1b takes {usual / whole:.2f} times as long as a list with whole backwards, "
        f"{usual / halves:.2f} times as long as one with halves; the best name {best / halves:.2f}"
    )


def gain(making: Making) -> float | None:
    """How many times as fast as the best name that fits; None where no name does."""
    made = make(making)
    pattern = Pattern.of(made)
    proven_order(pattern)
    held = [sum(each) for each in held_at_peak(pattern)]
    assert all(most <= room for most, room in zip(held, making.room, strict=True)), made
    named = [replace(making.pipeline, schedule=name) for name in making.alike()]
    seconds = [making.seconds(each) for each in named if making.fits(each)]
    takes = making.seconds(made)
    assert not seconds or takes * (1 - WORTH) <= min(seconds) * (1 + NOTHING), made
    return min(seconds) / takes if seconds else None


def distance(making: Making) -> float:
    """Part of the shortest step by which the made one is longer."""
    found = making.seconds(make(making))
    return found / small_of(making).shortest(int(found)) - 1


def _case(stages: list[tuple[float, float, float]], way_s: float, room: int, many: int) -> Making:
    names = ("forward_s", "input_grad_s", "weight_grad_s")
    times = [StageTimes(**dict(zip(names, stage, strict=True))) for stage in stages]
    return Making(
        pipeline=pipeline("1f1b", len(stages), many),
        stages=times,
        borders=[BorderTimes(transfer_s=way_s)] * (len(stages) - 1),
        room=(room,) * len(stages),
        names=tuple(SCHEDULES),
    )


CASES = {
    "two equal stages, a border of half a stage's time": _case([(1, 1, 1)] * 2, 1.5, 4, 32),
    "four unlike stages, borders of half a stage's time": _case(
        [(1.0, 1.1, 0.9), (0.8, 0.9, 0.8), (1.1, 1.2, 1.0), (0.7, 0.9, 0.6)], 1.5, 8, 32
    ),
    "four unlike stages, borders of a tenth": _case(
        [(1.0, 1.1, 0.9), (0.8, 0.9, 0.8), (1.1, 1.2, 1.0), (0.7, 0.9, 0.6)], 0.3, 8, 32
    ),
}

if __name__ == "__main__":
    main()
