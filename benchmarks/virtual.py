"""Virtual chips: does the trainer take the time that the simulator says, and hide what it sends?

    python -m benchmarks.virtual [--rounds N] [--schedule NAME ...] [--json]

Eight processes run the real executor, seams, gradient buckets and collectives with stages that
sleep instead of computing (``benchmarks/virtual_chips.py``), on chips and links of unlike speed.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from benchmarks.virtual_chips import (
    BORDER,
    LAYER_SHAPE,
    Chip,
    VirtualComm,
    VirtualStage,
    now,
    sleep_until,
)
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.comm.place import Place
from weft.elastic.pool import WorkerPool
from weft.nn.context import Context
from weft.parallel.gradients import Gradients
from weft.parallel.params import held_pieces, reduction_groups
from weft.parallel.pipeline.deferred import WeightWork
from weft.parallel.pipeline.executor import Executor, MicroBatch
from weft.parallel.pipeline.seam import channels
from weft.parallel.sharding import Unit, gather_in_time
from weft.plan.box import Box
from weft.plan.mesh import Mesh
from weft.plan.model import Init, ParamSpec
from weft.plan.plan import PipelinePlan, Plan, ScheduleName, StagePlan, ZeroLevel
from weft.plan.tiling import Tiling
from weft.schedules.registry import splits_backward
from weft.simulate.play import simulate_plan
from weft.simulate.times import SeamTimes, StageTimes
from weft.train.build import local_params

WORLD_SIZE = 8
SPEEDS = (1.0, 0.9, 0.7, 1.0, 0.8, 0.6, 0.9, 1.0)
"""Of the chip of each rank."""
POSITION = StageTimes(forward_s=0.040, input_grad_s=0.044, weight_grad_s=0.036)
"""All stages of one position on a chip of speed 1, one microbatch."""
LARGE = POSITION.scaled(3)
"""The same where gradients and parameters travel: eight processes that all start collectives at
one moment on few cores take a while."""
SEAM = SeamTimes(transfer_s=0.002, latency_s=0.001)
SETTLE_S = 0.02
"""From the agreement on a start to the start."""
TWO_STAGES = ("interleaved", "zb-v", "dualpipe-v")
MICROBATCHES = 12
LAYERS_EACH = 16
"""On each position, where gradients travel: so many buckets."""
BUCKET_BYTES = 512
"""What each of two holders of one layer sends of it, to sum it up or to hand it out."""
BUCKET_S = 0.007
"""How long links carry one bucket: less than the fastest chip takes for a layer's weight gradient.
Where links are slower than that, no order of work hides what they carry."""
NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)

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


@dataclass(frozen=True)
class Times:
    """One step of one rank, in seconds from the start that all ranks agreed on."""

    passes_s: float
    """Until its last backward ended."""
    step_s: float
    """Until its gradients were those of the whole job."""
    starting_s: float
    """How long the process was busy with starting to send parameters."""
    waited_s: float
    """How long its forwards waited for parameters."""
    carried_s: dict[str, float]
    """How long its links carried gradients and parameters."""


class VirtualRank:
    """One rank's stages, gradients and executor."""

    def __init__(self, plan: Plan, comm: VirtualComm, position: StageTimes) -> None:
        self._comm = comm
        seat = plan.seat(comm.rank)
        pipeline = seat.pipeline_plan
        work = WeightWork() if splits_backward(pipeline.schedule) else None
        times, chip = stage_times(pipeline, position), Chip()
        stages = {
            s: VirtualStage(range(*pipeline.stages[s].layers), times[s], chip, work)
            for s in seat.stages
        }
        self._gradients = _gradients(plan, stages, comm)
        crew: list[Unit] = []
        attendances = {
            s: gather_in_time(stage, self._gradients.sharded, crew) for s, stage in stages.items()
        }
        self._executor = Executor(
            seat,
            stages,
            comm,
            self._gradients,
            border=BORDER,
            scale=float(plan.global_batch),
            work=work,
            attendances=attendances,
        )
        one = torch.ones(1, 1, dtype=torch.int64)
        batch = MicroBatch(one, one, one.double(), Context())
        self._batch = [batch] * pipeline.num_microbatches

    def step(self) -> Times:
        """What an update left, sent on; then forward, backward, reduction. All begin at once."""
        start = torch.full((1,), now() + SETTLE_S, dtype=torch.float64)
        self._comm.all_reduce(start, name="start", largest=True)
        self._comm.carried_s.clear()
        self._comm.waited_s.clear()
        begun = float(start)
        sleep_until(begun)
        self._gradients.publish()
        published = now()
        self._executor.train(self._batch)
        passes = now()
        self._gradients.finish()
        end = now()
        waited = self._comm.waited_s["parameters"]
        carried = dict(self._comm.carried_s)
        return Times(passes - begun, end - begun, published - begun, waited, carried)


def _gradients(plan: Plan, stages: Mapping[int, VirtualStage], comm: Comm) -> Gradients:
    """The gradient path of every layer that some stage here holds."""
    whole = Box.whole(LAYER_SHAPE)
    specs, tilings = [], {}
    for number in range(plan.num_layers):
        name = f"layers.{number}.weight"
        init = Init("zeros")
        specs.append(ParamSpec(name=name, shape=LAYER_SHAPE, part=number, init=init, decay=False))
        holders = [s.mesh.ranks for _, _, s in plan.stages() if number in range(*s.layers)]
        tilings[name] = Tiling(LAYER_SHAPE, {rank: whole for ranks in holders for rank in ranks})
    pieces = held_pieces(plan, specs, tilings)
    comm.open_groups(reduction_groups(pieces))
    comm.open_gathering(reduction_groups(pieces, sharded=True))
    comm.open_channels(channels(plan))
    params = local_params(list(stages.values()), specs, dict.fromkeys(tilings, whole))
    return Gradients(params, pieces, comm, main_dtype=torch.float64, bucket_bytes=whole.numel * 8)


def run_steps(
    place: Place, plans: Sequence[Plan], rounds: int, position: StageTimes
) -> list[list[Times]]:
    """Every plan's steps. Plans take turns, so that what disturbs a round disturbs all of them."""
    comm = join(place, backend="gloo", device=torch.device("cpu"), timeout_s=60)
    try:
        virtual = VirtualComm(comm, SEAM, BUCKET_S / BUCKET_BYTES)
        ranks = [VirtualRank(plan, virtual, position) for plan in plans]
        turns = [[rank.step() for rank in ranks] for _ in range(rounds + 1)]
        return [[turn[number] for turn in turns[1:]] for number in range(len(plans))]
    finally:
        comm.close()


def schedule_records(pool: WorkerPool, names: Sequence[ScheduleName], rounds: int) -> list[Record]:
    """Measured against simulated, every schedule."""
    pipelines = [pipeline_plan(name, range(WORLD_SIZE), MICROBATCHES, 4) for name in names]
    plans = [Plan(num_layers=4 * WORLD_SIZE, pipelines=(pipeline,)) for pipeline in pipelines]
    ranks = pool.run(run_steps, plans, rounds, POSITION, world_size=WORLD_SIZE, timeout_s=900)
    records = []
    for number, (name, pipeline) in enumerate(zip(names, pipelines, strict=True)):
        measured = [max(t.step_s for t in step) for step in _by_step(ranks, number)]
        seams = [SEAM] * (len(pipeline.stages) - 1)
        simulated = simulate_plan(pipeline, stage_times(pipeline, POSITION), seams).step_s
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
    ranks = pool.run(run_steps, plans, rounds, LARGE, world_size=WORLD_SIZE, timeout_s=900)
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
