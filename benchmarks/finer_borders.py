"""What borders inside layers save by prediction, and what looking for them costs the planner.

    python -m benchmarks.finer_borders

Pipelines through one chip of each speed, with a few layers of Llama 2 7B: planned with whole layers
and with halves, all else alike. Processor time of the planner, both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from time import process_time

from benchmarks.every_plan import pool
from weft.cluster.view import ClusterView
from weft.models.llama.sizes import SIZES
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


def cluster(speeds: Sequence[float]) -> ClusterView:
    """One node with one chip for each."""
    pools = []
    for number, speed in enumerate(speeds):
        made = pool("H100-SXM5-80GB", 80, 1, gbit=400.0)
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


def main() -> None:
    """Print a row for each case."""
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
