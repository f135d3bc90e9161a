"""Virtual chips: does the trainer take the time that the simulator says, and hide what it sends?

    python -m benchmarks.virtual [--rounds N] [--schedule NAME ...] [--json]

Eight processes run the real executor, borders, gradient buckets and collectives with stages that
sleep instead of computing (``weft/virtual/sleeping.py``), on chips and links of unlike speed.

- Every schedule, eight unlike chips in one pipeline: measured time of a step against the timeline
  that ``weft.simulate`` plays from the same list.
- Two unlike pipelines of four stages, ZeRO level 1: the part of the time that links carry gradients
  or parameters in which nobody waits for them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from weft.cost.times import BorderTimes, StageTimes
from weft.elastic.pool import WorkerPool
from weft.parallel.pipeline.stage_border import channels
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, ScheduleName, StagePlan, ZeroLevel
from weft.schedules.registry import SCHEDULES
from weft.simulate.play import simulate_plan
from weft.virtual.rank import Times, VirtualJob, run_steps
from weft.virtual.sleeping import LEAST_NUMEL, LayerTimes, Links

WORLD_SIZE = 8
SPEEDS = (1.0, 0.9, 0.7, 1.0, 0.8, 0.6, 0.9, 1.0)
"""Of the chip of each rank."""
POSITION = StageTimes(forward_s=0.040, input_grad_s=0.044, weight_grad_s=0.036)
"""All stages of one position on a chip of speed 1, one microbatch."""
LARGE = POSITION.scaled(3)
"""The same where gradients and parameters travel: eight processes that all start collectives at
one moment on few cores take a while."""
BORDER = BorderTimes(transfer_s=0.002, latency_s=0.001)
TWO_STAGES = ("interleaved", "zb-v", "dualpipe-v")
MICROBATCHES = 12
LAYERS_EACH = 24
"""On each position, where gradients travel: so many buckets."""
BUCKET_BYTES = 512
"""What each of two holders of one layer sends of it, to sum it up or to hand it out."""
BUCKET_S = 0.0044
"""How long links carry one bucket: less than the fastest chip takes for a layer's weight gradient.
Where links are slower than that, no order of work hides what they carry."""
NAMES: tuple[ScheduleName, ...] = tuple(SCHEDULES)

Record = dict[str, Any]


def pipeline_plan(
    name: ScheduleName,
    ranks: range,
    num_microbatches: int,
    layers_each: int,
    *,
    zero: ZeroLevel = 0,
) -> PipelinePlan:
    """One rank a position, ``layers_each`` layers on every position."""
    meshes = [Mesh.of((rank,), dp=1) for rank in ranks]
    if name in TWO_STAGES:
        meshes += meshes if name == "interleaved" else meshes[::-1]
        layers_each //= 2
    stages = tuple(
        StagePlan(
            mesh=mesh,
            layers=(s * layers_each, (s + 1) * layers_each),
            precision="fp64",
            zero=zero,
        )
        for s, mesh in enumerate(meshes)
    )
    return PipelinePlan(stages=stages, samples=num_microbatches, microbatch=1, schedule=name)


def stage_times(pipeline: PipelinePlan, position: StageTimes) -> list[StageTimes]:
    """What each stage takes on its chip."""
    share = len(pipeline.positions()) / len(pipeline.stages)
    speeds = [SPEEDS[stage.mesh.ranks[0]] for stage in pipeline.stages]
    return [position.scaled(share / speed) for speed in speeds]


def virtual_job(plan: Plan, position: StageTimes) -> VirtualJob:
    """Every layer of a stage takes the same; chips and links are as above."""
    times = {}
    for p, s, stage in plan.stages():
        each = stage_times(plan.pipelines[p], position)[s]
        number = stage.layers[1] - stage.layers[0]
        times[p, s] = {
            rank: [LayerTimes(each.scaled(1 / number))] * number for rank in stage.mesh.ranks
        }
    return VirtualJob(
        plan=plan,
        times=times,
        numels=[LEAST_NUMEL] * plan.num_layers,
        bucket_bytes=8 * LEAST_NUMEL,
        links=Links(
            borders=dict.fromkeys(channels(plan), BORDER),
            pairs=dict.fromkeys(combinations(range(WORLD_SIZE), 2), BUCKET_S / BUCKET_BYTES),
        ),
    )


def schedule_records(pool: WorkerPool, names: Sequence[ScheduleName], rounds: int) -> list[Record]:
    """Measured against simulated, every schedule."""
    pipelines = [pipeline_plan(name, range(WORLD_SIZE), MICROBATCHES, 4) for name in names]
    plans = [Plan(num_layers=4 * WORLD_SIZE, pipelines=(pipeline,)) for pipeline in pipelines]
    jobs = [virtual_job(plan, POSITION) for plan in plans]
    ranks = pool.run(run_steps, jobs, rounds, world_size=WORLD_SIZE, timeout_s=900)
    records = []
    for number, (name, pipeline) in enumerate(zip(names, pipelines, strict=True)):
        measured = [max(t.step_s for t in step) for step in _by_step(ranks, number)]
        borders = [BORDER] * (len(pipeline.stages) - 1)
        simulated = simulate_plan(pipeline, stage_times(pipeline, POSITION), borders).step_s
        records.append(_record(f"step time, {name}", measured, "simulated", simulated, "s"))
    return records


def hidden_records(pool: WorkerPool, names: Sequence[ScheduleName], rounds: int) -> list[Record]:
    """How much of the time that links are busy nobody has to wait.

    With ZeRO level 1 both gradients and updated parameters travel: gradients until the last
    backward of the job has ended, parameters while forwards of the next step are done.
    """
    half = WORLD_SIZE // 2
    plans = [
        Plan(
            num_layers=LAYERS_EACH * half,
            pipelines=(
                pipeline_plan(name, range(half), 3, LAYERS_EACH, zero=1),
                pipeline_plan(name, range(half, WORLD_SIZE), 2, LAYERS_EACH, zero=1),
            ),
        )
        for name in names
    ]
    jobs = [virtual_job(plan, LARGE) for plan in plans]
    ranks = pool.run(run_steps, jobs, rounds, world_size=WORLD_SIZE, timeout_s=900)
    records = []
    for number, name in enumerate(names):
        steps = _by_step(ranks, number)
        reduced, gathered, starting = [], [], []
        for step in steps:
            left = max(t.step_s for t in step) - max(t.passes_s for t in step)
            reduced.append(1 - left / max(t.carried_s["gradients"] for t in step))
            carried = max(t.carried_s["parameters"] for t in step)
            gathered.append(1 - max(t.waited_s for t in step) / carried)
            starting.append(max(t.starting_s for t in step))
        records.append(_record(f"reduction hidden, {name}", reduced, "aim", 0.9, "share"))
        records.append(_record(f"gather hidden, {name}", gathered, "aim", 0.9, "share"))
        records.append(_record(f"gather started, {name}", starting, "links", carried, "s"))
    return records


def _by_step(ranks: Sequence[Sequence[Sequence[Times]]], plan: int) -> list[tuple[Times, ...]]:
    """What all ranks saw of each step of one plan."""
    return list(zip(*(rank[plan] for rank in ranks), strict=True))


def _record(name: str, ours: Sequence[float], peer: str, theirs: float, unit: str) -> Record:
    """The schema that every benchmark prints."""
    middle = statistics.median(ours)
    ratios = sorted(theirs / value for value in ours)
    quarter = statistics.quantiles(ratios, n=4)
    return {
        "name": name,
        "ours": middle,
        "theirs": {peer: theirs},
        "ratio": theirs / middle,
        "unit": unit,
        "spread": [quarter[0], quarter[2]],
    }


def main() -> None:
    """Run the comparisons and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schedule", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with WorkerPool() as pool:
        steps = schedule_records(pool, options.schedule, options.rounds)
        hidden = hidden_records(pool, options.schedule, options.rounds)
    if options.json:
        print(json.dumps(steps + hidden, indent=2))
        return
    for record in steps:
        ours, simulated = record["ours"], record["theirs"]["simulated"]
        print(
            f"{record['name']}: {ours:.3f} s, simulated {simulated:.3f} s, "
            f"measured / simulated {ours / simulated:.3f}"
        )
    for record in hidden:
        ours = record["ours"]
        print(record["name"], f"{ours:.1%}" if record["unit"] == "share" else f"in {ours:.3f} s")


if __name__ == "__main__":
    main()
