"""One rank on virtual chips: the real executor, borders, gradient buckets and collectives.

Only stages and links are not real (``weft/virtual/sleeping.py``): they take modelled time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch

from weft.comm.address import RankAddress
from weft.comm.join import join
from weft.nn.stage import STREAM, MicroBatch
from weft.parallel.gradients import Gradients
from weft.parallel.params import stages_with
from weft.plan.borders import in_parts
from weft.plan.box import Box
from weft.plan.layout import BorderTensor, Dim
from weft.plan.mesh import Mesh
from weft.plan.model import Init, ParamSpec
from weft.plan.plan import Plan, RankPlan
from weft.plan.tiling import Tiling
from weft.precision.registry import PRECISIONS
from weft.train.assemble import Share, Source, assemble
from weft.virtual.sleeping import (
    Chip,
    LayerTimes,
    Links,
    VirtualComm,
    VirtualLayer,
    VirtualStage,
    key_of,
    now,
    sleep_until,
    sum_of_output,
)

SETTLE_S = 0.02
"""From the agreement on a start to the start."""


@dataclass(frozen=True, kw_only=True)
class VirtualJob:
    """A plan, and how long everything in it takes."""

    plan: Plan
    """Its layers are whatever takes time: the ends of a model may be layers too."""
    times: Mapping[tuple[int, int], Mapping[int, Sequence[LayerTimes]]]
    """Of one sample, by pipeline and stage, rank and layer of the stage."""
    numels: Sequence[int]
    """Elements of each layer's parameter as they really travel; a layer that the plan cuts is two,
    each with its own."""
    bucket_bytes: int
    links: Links
    update_s: Mapping[int, float] = field(default_factory=dict)
    """By rank: what its chip does once a step, when gradients are reduced."""
    width: int = 1
    """Of what crosses a border, for one sample; tensor-parallel ranks share it."""


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
        source = _source(job.plan.rank_plan(comm.rank), job, self._chip)
        plain = replace(job.plan, sums="")  # what travels says when it was sent
        built = assemble(plain, source, comm, _NoUpdate, bucket_bytes=job.bucket_bytes)
        self._gradients, self._executor = built.gradients, built.executor
        self._batch = [_samples(len(part)) for part in job.plan.rank_plan(comm.rank).microbatches()]

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


class _NoUpdate:
    """What an update takes is played after it."""

    def __init__(self, _gradients: Gradients) -> None:
        """Nothing is kept."""

    def update(self, factor: torch.Tensor) -> None:
        """Changes nothing."""


def _source(rank_plan: RankPlan, job: VirtualJob, chip: Chip) -> Source:
    """Layers that take time, each with one parameter; tensor-parallel ranks hold parts."""
    specs = [
        ParamSpec(
            name=f"layers.{key_of(place)}.weight",
            shape=(numel,),
            unit=place,
            init=Init("zeros"),
            decay=False,
        )
        for place, numel in zip(rank_plan.plan.places, job.numels, strict=True)
    ]
    tilings = {}
    for spec in specs:
        meshes = [stage.mesh for stage in stages_with(spec, rank_plan.plan)]
        boxes = {rank: (_part(mesh, rank, spec.numel),) for mesh in meshes for rank in mesh.ranks}
        tilings[spec.name] = Tiling(spec.shape, boxes)

    def stage(number: int, share: Share) -> VirtualStage:
        stage = rank_plan.pipeline_plan.stages[number]
        times_of = job.times[rank_plan.pipeline, number][rank_plan.rank]
        layers = {
            place: VirtualLayer(
                times, prod(share.stored[f"layers.{key_of(place)}.weight"].size), chip
            )
            for (place, _), times in zip(
                in_parts(stage.layers, rank_plan.plan.cuts), times_of, strict=True
            )
        }
        return VirtualStage(layers, _part(stage.mesh, rank_plan.rank, job.width).numel)

    border = {STREAM: BorderTensor((Dim(name="seq", size=job.width),))}
    return Source(
        specs=specs,
        tilings=tilings,
        precision=PRECISIONS["fp64"],
        stage=stage,
        objective=lambda _last: sum_of_output,
        borders=dict.fromkeys(range(len(rank_plan.pipeline_plan.stages) - 1), border),
        expected_weight=float(rank_plan.plan.global_batch),
    )


def _samples(number: int) -> MicroBatch:
    return MicroBatch({STREAM: torch.ones(number, 1)})


def _part(mesh: Mesh, rank: int, numel: int) -> Box:
    """Ranks that compute the same samples hold parts."""
    part = mesh.part(numel, rank, mesh.model_axes)
    return Box((part.start,), (len(part),))


def run_steps(address: RankAddress, jobs: Sequence[VirtualJob], rounds: int) -> list[list[Times]]:
    """Every job's steps, after one to warm up.

    Jobs take turns, so that what disturbs a round disturbs all of them.
    """
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    try:
        ranks = [VirtualRank(job, VirtualComm(comm, job.links)) for job in jobs]
        turns = [[rank.step() for rank in ranks] for _ in range(rounds + 1)]
        return [[turn[number] for turn in turns[1:]] for number in range(len(jobs))]
    finally:
        comm.close()
