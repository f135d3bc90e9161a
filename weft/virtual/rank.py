"""One rank on virtual chips: the real executor, seams, gradient buckets and collectives.

Only stages and links are not real (``weft/virtual/sleeping.py``): they take modelled time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from weft.comm.address import RankAddress
from weft.comm.join import join
from weft.cost.times import StageTimes
from weft.models.decoder import Decoder
from weft.nn.context import Context
from weft.parallel.gradients import Gradients
from weft.parallel.params import held_pieces, reduction_groups
from weft.parallel.pipeline.deferred import WeightWork
from weft.parallel.pipeline.executor import Executor, MicroBatch
from weft.parallel.pipeline.seam import channels
from weft.parallel.runtimes import axis_groups
from weft.parallel.sharding import Unit, gather_in_time
from weft.plan.box import Box
from weft.plan.mesh import Mesh
from weft.plan.model import Init, ParamSpec
from weft.plan.plan import Plan, Seat
from weft.plan.tiling import Stored, Tiling, part_of
from weft.precision.roles import PRECISIONS
from weft.schedules.registry import splits_backward
from weft.train.build import local_params
from weft.virtual.sleeping import (
    NOTHING,
    Chip,
    Links,
    VirtualComm,
    VirtualLayer,
    VirtualStage,
    now,
    sleep_until,
)

SETTLE_S = 0.02
"""From the agreement on a start to the start."""

StageKey = tuple[int, int]
"""Pipeline, stage."""


@dataclass(frozen=True, kw_only=True)
class VirtualJob:
    """A plan, and how long everything in it takes."""

    plan: Plan
    """Its layers are whatever takes time: the ends of a model may be layers too."""
    times: Mapping[StageKey, Mapping[int, Sequence[StageTimes]]]
    """Of one sample, by stage, rank and layer of the stage."""
    numels: Sequence[int]
    """Elements of each layer's parameter as they really travel."""
    bucket_bytes: int
    links: Links
    said: Mapping[StageKey, Sequence[StageTimes]] = field(default_factory=dict)
    """How long tensor-parallel ranks wait for each other in each layer, likewise."""
    update_s: Mapping[int, float] = field(default_factory=dict)
    """By rank: what its chip does once a step, when gradients are reduced."""
    width: int = 1
    """Of what crosses a seam, for one sample; tensor-parallel ranks share it."""


@dataclass(frozen=True)
class Times:
    """One step of one rank, in seconds from the start that all ranks agreed on."""

    passes_s: float
    """Until its last backward ended."""
    step_s: float
    """Until its gradients were those of the whole job, and its update made."""
    starting_s: float
    """How long the process was busy with starting to send parameters."""
    busy_s: float
    """How long its chip computed."""
    waited_s: float
    """How long its forwards waited for parameters."""
    carried_s: dict[str, float]
    """How long its links carried gradients and parameters."""


class VirtualRank:
    """One rank's stages, gradients and executor."""

    def __init__(self, job: VirtualJob, comm: VirtualComm) -> None:
        self._comm = comm
        self._chip = Chip()
        self._update_s = job.update_s.get(comm.rank, 0.0)
        seat = job.plan.seat(comm.rank)
        pipeline = seat.pipeline_plan
        work = WeightWork() if splits_backward(pipeline.schedule) else None
        stages = {s: _stage(job, seat, s, self._chip, work) for s in seat.stages}
        self._gradients = _gradients(job, stages, comm)
        crew: list[Unit] = []
        attendances = {
            s: gather_in_time(cast(Decoder, stage), self._gradients.sharded, crew)
            for s, stage in stages.items()
        }
        self._executor = Executor(
            seat,
            stages,
            comm,
            self._gradients,
            border=(job.width,),
            scale=float(job.plan.global_batch),
            work=work,
            attendances=attendances,
        )
        self._batch = [_samples(len(part)) for part in seat.microbatches()]

    def step(self) -> Times:
        """What an update left, sent on; then forward, backward, reduction. All begin at once."""
        start = torch.full((1,), now() + SETTLE_S, dtype=torch.float64)
        self._comm.all_reduce(start, name="start", largest=True)
        self._comm.carried_s.clear()
        self._comm.waited_s.clear()
        self._chip.begin()
        begun = float(start)
        sleep_until(begun)
        self._gradients.publish()
        published = now()
        self._executor.train(self._batch)
        passes = now()
        self._gradients.finish()
        self._chip.work(self._update_s)
        return Times(
            passes_s=passes - begun,
            step_s=now() - begun,
            starting_s=published - begun,
            busy_s=self._chip.worked_s,
            waited_s=self._comm.waited_s["parameters"],
            carried_s=dict(self._comm.carried_s),
        )


def _stage(
    job: VirtualJob, seat: Seat, number: int, chip: Chip, work: WeightWork | None
) -> VirtualStage:
    stage = seat.pipeline_plan.stages[number]
    tp = stage.mesh.size("tp")
    times_of = job.times[seat.pipeline, number][seat.rank]
    said = job.said.get((seat.pipeline, number), [NOTHING] * len(times_of))
    mine = stage.mesh.coordinate(seat.rank)["tp"]
    layers = {
        layer: VirtualLayer(
            times, len(part_of(job.numels[layer], tp, mine)), chip, work, said=waits
        )
        for layer, times, waits in zip(range(*stage.layers), times_of, said, strict=True)
    }
    return VirtualStage(layers, len(part_of(job.width, tp, mine)))


def _samples(number: int) -> MicroBatch | None:
    if not number:
        return None
    one = torch.ones(number, 1, dtype=torch.int64)
    return MicroBatch(one, one, one.double(), Context())


def _gradients(job: VirtualJob, stages: Mapping[int, VirtualStage], comm: VirtualComm) -> Gradients:
    """The gradient path of every layer that some stage here holds."""
    specs, tilings = [], {}
    for number, numel in enumerate(job.numels):
        name = f"layers.{number}.weight"
        init = Init("zeros")
        specs.append(ParamSpec(name=name, shape=(numel,), part=number, init=init, decay=False))
        held = [s.mesh for _, _, s in job.plan.stages() if number in range(*s.layers)]
        boxes = {rank: (_part(mesh, rank, numel),) for mesh in held for rank in mesh.ranks}
        tilings[name] = Tiling((numel,), boxes)
    pieces = held_pieces(job.plan, specs, tilings)
    comm.open_groups([*axis_groups(job.plan), *reduction_groups(pieces)])
    comm.open_gathering(reduction_groups(pieces, sharded=True))
    comm.open_channels(channels(job.plan))
    mine = {n: Stored(t.boxes[comm.rank]) for n, t in tilings.items() if comm.rank in t.boxes}
    return Gradients(
        local_params(list(stages.values()), specs, mine),
        pieces,
        comm,
        precision=PRECISIONS["fp64"],
        bucket_bytes=job.bucket_bytes,
        rounds=job.plan.seat(comm.rank).pipeline_plan.num_microbatches,
    )


def _part(mesh: Mesh, rank: int, numel: int) -> Box:
    """Tensor-parallel ranks hold parts."""
    part = part_of(numel, mesh.size("tp"), mesh.coordinate(rank)["tp"])
    return Box((part.start,), (len(part),))


def run_steps(address: RankAddress, jobs: Sequence[VirtualJob], rounds: int) -> list[list[Times]]:
    """Every job's steps, after one to warm up.

    Jobs take turns, so that what disturbs a round disturbs all of them.
    """
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=60)
    try:
        ranks = [VirtualRank(job, VirtualComm(comm, job.links)) for job in jobs]
        turns = [[rank.step() for rank in ranks] for _ in range(rounds + 1)]
        return [[turn[number] for turn in turns[1:]] for number in range(len(jobs))]
    finally:
        comm.close()
