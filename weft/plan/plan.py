"""The plan: what will run, with nothing left to guess. Prints, compares and saves as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from weft.plan.mesh import Mesh
from weft.plan.tiling import split_evenly

Precision = Literal["fp64", "fp32", "bf16"]
Recompute = Literal["off", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """Consecutive layers on a mesh of ranks of one chip kind, and how they compute."""

    mesh: Mesh
    layers: tuple[int, int]
    """Half-open range of decoder layers; the first stage adds the embedding, the last the head."""
    device: str = "cpu"
    """Platform name: the family of chip that every rank of this stage runs on."""
    precision: Precision = "fp32"
    recompute: Recompute = "off"
    compile: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """Stages in order, and the part of every global batch that flows through them."""

    stages: tuple[StagePlan, ...]
    samples: int
    """Samples of each global batch that this pipeline takes."""
    microbatch: int
    """Samples in one microbatch, over all data-parallel ranks of a stage; the last may be less."""

    @property
    def num_microbatches(self) -> int:
        return -(-self.samples // self.microbatch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One job: pipelines side by side over disjoint ranks ``0 .. world_size - 1``."""

    num_layers: int
    pipelines: tuple[PipelinePlan, ...]

    @property
    def global_batch(self) -> int:
        """Samples in one step of the whole job."""
        return sum(pipeline.samples for pipeline in self.pipelines)

    @property
    def world_size(self) -> int:
        return sum(len(stage.mesh.ranks) for _, _, stage in self.stages())

    def stages(self) -> Iterator[tuple[int, int, StagePlan]]:
        """(pipeline number, stage number, stage) in order."""
        for p, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                yield p, s, stage

    def seat(self, rank: int) -> Seat:
        """Where a rank sits. Every rank of a valid plan has exactly one seat."""
        for p, s, stage in self.stages():
            if rank in stage.mesh.ranks:
                return Seat(rank=rank, pipeline=p, stage=s, plan=self)
        raise AssertionError(f"rank {rank} is not in a plan of {self.world_size} ranks")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what ``to_json`` wrote. The caller checks the result with ``validate``."""
        data = json.loads(text)
        pipelines = tuple(_pipeline(entry) for entry in data.pop("pipelines"))
        return Plan(pipelines=pipelines, **data)


def _pipeline(data: dict[str, Any]) -> PipelinePlan:
    stages = tuple(_stage(entry) for entry in data.pop("stages"))
    return PipelinePlan(stages=stages, **data)


def _stage(data: dict[str, Any]) -> StagePlan:
    mesh = data.pop("mesh")
    axes = tuple((str(name), int(size)) for name, size in mesh["axes"])
    layers = (int(data["layers"][0]), int(data["layers"][1]))
    return StagePlan(**{**data, "mesh": Mesh(tuple(mesh["ranks"]), axes), "layers": layers})


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """One rank's place in a plan, and the arithmetic that follows from it."""

    rank: int
    pipeline: int
    stage: int
    plan: Plan

    @property
    def pipeline_plan(self) -> PipelinePlan:
        return self.plan.pipelines[self.pipeline]

    @property
    def stage_plan(self) -> StagePlan:
        return self.pipeline_plan.stages[self.stage]

    @property
    def is_first(self) -> bool:
        """This stage holds the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """This stage holds the final norm, the head and the loss."""
        return self.stage == len(self.pipeline_plan.stages) - 1

    def microbatches(self) -> list[range]:
        """Positions inside the global batch that this rank computes, one range a microbatch.

        Depends on the plan alone: pipelines take consecutive shares of the batch, microbatches
        consecutive parts of a share, data-parallel ranks consecutive parts of a microbatch.
        A range may be empty.
        """
        pipeline, mesh = self.pipeline_plan, self.stage_plan.mesh
        start = sum(p.samples for p in self.plan.pipelines[: self.pipeline])
        dp_rank = mesh.coordinate(self.rank)["dp"]
        result = []
        for low in range(start, start + pipeline.samples, pipeline.microbatch):
            size = min(pipeline.microbatch, start + pipeline.samples - low)
            shares = split_evenly(size, mesh.size("dp"))
            first = low + sum(shares[:dp_rank])
            result.append(range(first, first + shares[dp_rank]))
        return result
