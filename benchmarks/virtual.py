"""Virtual chips: does the trainer take the time that the simulator says, and hide what it sends?

    python -m benchmarks.virtual [--rounds N] [--schedule NAME ...] [--json]

Eight processes run the real executor, seams, gradient buckets and collectives with stages that
sleep instead of computing (``benchmarks/virtual_chips.py``), on chips and links of unlike speed.

- Every schedule, eight unlike chips in one pipeline: measured time of a step against the timeline
  that ``weft.simulate`` plays from the same list.
- Two unlike pipelines of four stages: the part of the time the links carry gradients that is over
  before the last backward of the job is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from benchmarks.virtual_chips import (
    BORDER,
    Chip,
    VirtualComm,
    VirtualStage,
    layer_name,
    now,
    sleep_until,
)
from weft.comm.join import join
from weft.comm.place import Place
from weft.elastic.pool import WorkerPool
from weft.nn.context import Context
from weft.parallel.gradients import Gradients
from weft.parallel.params import LocalParam
from weft.parallel.pipeline.deferred import WeightWork
from weft.parallel.pipeline.executor import Executor, MicroBatch
from weft.plan.box import Box
from weft.plan.mesh import Mesh
from weft.plan.model import Init, ParamSpec
from weft.plan.plan import PipelinePlan, Plan, ScheduleName, StagePlan
from weft.plan.tiling import Piece
from weft.schedules.registry import splits_backward
from weft.simulate.play import simulate_plan
from weft.simulate.times import SeamTimes, StageTimes

WORLD_SIZE = 8
SPEEDS = (1.0, 0.9, 0.7, 1.0, 0.8, 0.6, 0.9, 1.0)
"""Of the chip of each rank."""
POSITION = StageTimes(forward_s=0.040, input_grad_s=0.044, weight_grad_s=0.036)
"""All stages of one position on a chip of speed 1, one microbatch."""
SEAM = SeamTimes(transfer_s=0.002, latency_s=0.001)
SETTLE_S = 0.02
"""From the agreement on a start to the start."""
TWO_STAGES = ("interleaved", "zb-v", "dualpipe-v")
MICROBATCHES = 12
LAYERS_EACH = 16
"""On each position, where gradients travel: so many buckets."""
BUCKET_BYTES = 16
"""One layer's gradient."""
BUCKET_S = 0.002
"""How long links carry one bucket: less than the fastest chip takes for a layer's weight gradient.
Where links are slower than that, no order of work hides what they carry."""
NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)

Record = dict[str, Any]


def pipeline_plan(
    name: ScheduleName, ranks: range, num_microbatches: int, layers_each: int
) -> PipelinePlan:
    """One rank a position, ``layers_each`` layers on every position."""
    meshes = [Mesh.of((rank,), dp=1) for rank in ranks]
    if name in TWO_STAGES:
        meshes += meshes if name == "interleaved" else meshes[::-1]
        layers_each //= 2
    stages = tuple(
        StagePlan(mesh=mesh, layers=(s * layers_each, (s + 1) * layers_each), precision="fp64")
        for s, mesh in enumerate(meshes)
    )
    return PipelinePlan(stages=stages, samples=num_microbatches, microbatch=1, schedule=name)


def stage_times(pipeline: PipelinePlan) -> list[StageTimes]:
    """What each stage takes on its chip."""
    share = len(pipeline.positions()) / len(pipeline.stages)
    speeds = [SPEEDS[stage.mesh.ranks[0]] for stage in pipeline.stages]
    return [
        StageTimes(
            forward_s=POSITION.forward_s * share / speed,
            input_grad_s=POSITION.input_grad_s * share / speed,
            weight_grad_s=POSITION.weight_grad_s * share / speed,
        )
        for speed in speeds
    ]


@dataclass(frozen=True)
class Times:
    """One step of one rank, in seconds from the start that all ranks agreed on."""

    passes_s: float
    """Until its last backward ended."""
    step_s: float
    """Until its gradients were those of the whole job."""
    carried_s: float
    """How long its links carried gradients."""


class VirtualRank:
    """One rank's stages, gradients and executor."""

    def __init__(self, plan: Plan, comm: VirtualComm) -> None:
        self._comm = comm
        seat = plan.seat(comm.rank)
        pipeline = seat.pipeline_plan
        work = WeightWork() if splits_backward(pipeline.schedule) else None
        times, chip = stage_times(pipeline), Chip()
        stages = {
            s: VirtualStage(range(*pipeline.stages[s].layers), times[s], chip, work)
            for s in seat.stages
        }
        params = [_local(name, p) for m in stages.values() for name, p in m.weights.items()]
        holders = _holders(plan)
        comm.open_groups(sorted(set(holders.values())), 60.0)
        self._gradients = Gradients(
            params,
            {name: [Piece(Box.whole((2,)), ranks)] for name, ranks in holders.items()},
            comm,
            main_dtype=torch.float64,
            bucket_bytes=BUCKET_BYTES,
        )
        scale = float(plan.global_batch)
        self._executor = Executor(
            seat, stages, comm, self._gradients, border=BORDER, scale=scale, work=work
        )
        one = torch.ones(1, 1, dtype=torch.int64)
        batch = MicroBatch(one, one, one.double(), Context())
        self._batch = [batch] * pipeline.num_microbatches

    def step(self) -> Times:
        """Forward, backward and reduction, begun by all ranks at once."""
        start = torch.full((1,), now() + SETTLE_S, dtype=torch.float64)
        self._comm.all_reduce(start, name="start", largest=True)
        carried = self._comm.carried_s
        sleep_until(float(start))
        self._executor.train(self._batch)
        passes = now()
        self._gradients.finish()
        end = now()
        return Times(passes - float(start), end - float(start), self._comm.carried_s - carried)


def _local(name: str, param: torch.nn.Parameter) -> LocalParam:
    shape = tuple(param.shape)
    spec = ParamSpec(name=name, shape=shape, part=0, init=Init("zeros"), decay=False)
    return LocalParam(spec, Box.whole(shape), param)


def _holders(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The ranks that hold each layer, by its parameter's name."""
    found: dict[str, tuple[int, ...]] = {}
    for _, _, stage in plan.stages():
        for layer in range(*stage.layers):
            name = layer_name(layer)
            found[name] = tuple(sorted({*found.get(name, ()), *stage.mesh.ranks}))
    return found


def run_steps(
    place: Place, plans: Sequence[Plan], rounds: int, seconds_per_byte: float
) -> list[list[Times]]:
    """Every plan's steps. Plans take turns, so that what disturbs a round disturbs all of them."""
    comm = join(place, backend="gloo", device=torch.device("cpu"), timeout_s=60)
    try:
        virtual = VirtualComm(comm, SEAM, seconds_per_byte)
        ranks = [VirtualRank(plan, virtual) for plan in plans]
        turns = [[rank.step() for rank in ranks] for _ in range(rounds + 1)]
        return [[turn[number] for turn in turns[1:]] for number in range(len(plans))]
    finally:
        comm.close()


def schedule_records(pool: WorkerPool, names: Sequence[ScheduleName], rounds: int) -> list[Record]:
    """Measured against simulated, every schedule."""
    pipelines = [pipeline_plan(name, range(WORLD_SIZE), MICROBATCHES, 4) for name in names]
    plans = [Plan(num_layers=4 * WORLD_SIZE, pipelines=(pipeline,)) for pipeline in pipelines]
    ranks = pool.run(run_steps, plans, rounds, 0.0, world_size=WORLD_SIZE, timeout_s=900)
    records = []
    for number, (name, pipeline) in enumerate(zip(names, pipelines, strict=True)):
        measured = [max(t.step_s for t in step) for step in _by_step(ranks, number)]
        seams = [SEAM] * (len(pipeline.stages) - 1)
        simulated = simulate_plan(pipeline, stage_times(pipeline), seams).step_s
        records.append(_record(f"step time, {name}", measured, "simulated", simulated, "s"))
    return records


def hidden_records(pool: WorkerPool, names: Sequence[ScheduleName], rounds: int) -> list[Record]:
    """How much of the time that links carry gradients is over before the last backward is."""
    half = WORLD_SIZE // 2
    plans = [
        Plan(
            num_layers=LAYERS_EACH * half,
            pipelines=(
                pipeline_plan(name, range(half), 6, LAYERS_EACH),
                pipeline_plan(name, range(half, WORLD_SIZE), 4, LAYERS_EACH),
            ),
        )
        for name in names
    ]
    args = (plans, rounds, BUCKET_S / BUCKET_BYTES)
    ranks = pool.run(run_steps, *args, world_size=WORLD_SIZE, timeout_s=900)
    records = []
    for number, name in enumerate(names):
        shares = []
        for step in _by_step(ranks, number):
            left = max(t.step_s for t in step) - max(t.passes_s for t in step)
            shares.append(1 - left / max(t.carried_s for t in step))
        records.append(_record(f"reduction hidden, {name}", shares, "aim", 0.9, "share"))
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
        print(f"{record['name']}: {record['ours']:.1%}")


if __name__ == "__main__":
    main()
