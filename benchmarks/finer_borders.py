"""What borders inside layers save by prediction, and what looking for them costs the planner.

    python -m benchmarks.finer_borders

Pipelines through one chip of each speed, with a few layers of Llama 2 7B: planned with whole layers
and with halves, all else alike. Processor time of the planner, both ways. First two or three chips
of drawn speeds under 1F1B: how far what the planner's moves find is from the best of all splits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from random import Random
from statistics import geometric_mean
from time import process_time

from benchmarks.every_plan import pool
from weft.cluster.view import ClusterView
from weft.models.llama.sizes import SIZES
from weft.plan.plan import Plan
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import search

SPEEDS = ((1.0, 0.5), (1.0, 1.0), (1.0, 0.8, 0.45), (1.0, 0.6, 0.3), (1.0, 1.0, 1.0))
LAYERS = (3, 4, 5, 6, 8, 12, 16)
OPTIONS = Options(
    leave_idle=False, max_pipelines=1, max_ranks=1, recompute=("off",), in_flight=True
)


@dataclass(frozen=True, slots=True)
class Planned:
    """One plan."""

    step_s: float
    planning_s: float
    layers: str


def cluster(speeds: Sequence[float], gib: float = 80) -> ClusterView:
    """One node with one chip for each."""
    pools = []
    for number, speed in enumerate(speeds):
        made = pool("H100-SXM5-80GB", gib, 1, gbit=400.0)
        rates = {dtype: speed * rate for dtype, rate in made.chip.peak_tflops.items()}
        chip = replace(made.chip, name=f"kind {number}", peak_tflops=rates)
        pools.append(replace(made, chip=chip))
    return ClusterView(tuple(pools))


def planned(num_layers: int, speeds: Sequence[float], *, cuts: bool) -> Planned:
    """The best plan."""
    spec = replace(SIZES["llama2-7b"], num_layers=num_layers)
    workload = Workload(spec=spec, seq_len=4096, samples=16)
    options = replace(OPTIONS, cuts_layers=cuts)
    begin = process_time()
    best = search(Problem(workload, cluster(speeds), options=options)).best
    seconds = process_time() - begin
    stages = best.plan.pipelines[0].stages
    words = " + ".join(f"{stage.layers[1] - stage.layers[0]:g}" for stage in stages)
    return Planned(best.time.step_s, seconds, f"{words} ({best.plan.pipelines[0].schedule})")


def every_split(plan: Plan) -> Iterator[Plan]:
    """All ways to cut the pipeline of a plan of one at layers and inside them."""
    (pipeline,) = plan.pipelines
    halves = [n / 2 for n in range(2 * plan.num_layers + 1)]
    for inside in combinations(halves, len(pipeline.stages) - 1):
        ends = pairwise((0, *inside, plan.num_layers))
        both = zip(pipeline.stages, ends, strict=True)
        stages = tuple(replace(stage, layers=layers) for stage, layers in both)
        yield replace(plan, pipelines=(replace(pipeline, stages=stages),))


def distance(asked: Problem) -> float:
    """How many times as long the planner's plan takes as the best split of its pipeline."""
    best = search(asked).best
    there = asked.on(best.cluster)
    return best.time.step_s / min(there.time(plan).step_s for plan in every_split(best.plan))


def drawn(draws: Random) -> Problem:
    """A small problem that is none like those above."""
    many = draws.choice((2, 3))
    speeds = [round(draws.uniform(0.25, 1), 2) for _ in range(many)]
    spec = replace(SIZES["llama2-7b"], num_layers=draws.randint(many, 7))
    workload = Workload(spec=spec, seq_len=4096, samples=16)
    options = replace(OPTIONS, cuts_layers=True, in_flight=False, schedules=("1f1b",), micros=(1,))
    return Problem(workload, cluster(speeds), options=options)


def main() -> None:
    """Print a row for each case."""
    draws = Random(1)
    far = [distance(drawn(draws)) for _ in range(60)]
    print(f"of the best of all splits: mean {geometric_mean(far):.4f}, at most {max(far):.4f}")
    gains, spent = [], [0.0, 0.0]
    for num_layers in LAYERS:
        for speeds in SPEEDS:
            whole, cut = (planned(num_layers, speeds, cuts=cuts) for cuts in (False, True))
            gains.append(whole.step_s / cut.step_s)
            spent = [spent[0] + whole.planning_s, spent[1] + cut.planning_s]
            print(f"{num_layers:2} layers on {speeds}: {gains[-1]:.3f}  {whole.layers}", end="")
            print(f" -> {cut.layers}" if gains[-1] > 1 else "")
    many = sum(gain > 1 for gain in gains)
    print(
        f"{many} of {len(gains)} gain; at most {max(gains):.3f}, mean {geometric_mean(gains):.3f}"
    )
    print(f"planning takes {spent[1] / spent[0]:.3f} times as long ({spent[0]:.1f} s without)")


if __name__ == "__main__":
    main()
