"""What one stage of a pipeline may choose: the one description that all costs are asked about.

A stage of a plan, a mesh of a search and a line of a published table all become a ``StageChoice``.
Its memory is ``stage_memory``, its time ``stage_times``, what its layers send ``layer_sends``.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from weft.cluster.cluster import Dtype
from weft.cost.work import (
    ALL_BY_ADAMW,
    ALL_PARTS,
    BF16_STATE,
    DIVISIONS,
    Axes,
    Parts,
    StageWork,
    StateBytes,
    Training,
    copies_in,
    dividing,
    share,
    stride,
    width_of,
)
from weft.plan.plan import PipelinePlan, Precision, ZeroLevel

ALL = float("inf")


class Group(NamedTuple):
    """Ranks that talk: how many, and the distance between neighbours in the order of ranks."""

    size: int
    stride: int = 1


class StageChoice(NamedTuple):
    """Layers on a mesh of like chips, and how its ranks compute and keep them."""

    work: StageWork
    """Of one rank in a pass of a full microbatch, on the rank with the most samples."""
    axes: Axes = ()
    """Sizes of the mesh, those above 1, outermost first."""
    passes: int = 1
    pipelines: int = 1
    """Side by side, which hold the same parameters, this one counted."""
    state: StateBytes = BF16_STATE
    trained: Parts = ALL_PARTS
    zero: ZeroLevel = 0
    shard_ways: int = 0
    """Ranks, next to each other, that share what ``zero`` names; 0 is all that hold the same."""
    overlap: float = ALL
    """Microbatches whose computing may hide gradients and parameters on their way."""

    def holding(self, layers: tuple[int, int], *, embeds: bool, predicts: bool) -> StageChoice:
        """The same of a stage that holds other layers."""
        work = self.work._replace(layers=layers, embeds=embeds, predicts=predicts)
        return self._replace(work=work)

    @property
    def copies(self) -> int:
        """Ranks of the mesh that hold the same parameters."""
        return copies_in(self.axes)

    @property
    def num_holders(self) -> int:
        """Ranks that hold the same parameters; level 3 keeps other pipelines out of it."""
        return self.copies * (self.pipelines if self.zero < 3 else 1)

    @property
    def ways(self) -> int:
        """Of these, how many share what the level of ZeRO names."""
        return min(self.shard_ways or self.num_holders, self.num_holders) if self.zero else 1

    def holders(self, chips_per_node: int) -> Group:
        """Ranks that hold the same parameters. Those of other pipelines are on other nodes."""
        names = [name for name, _ in self.axes if DIVISIONS[name].copies]
        near = stride(self.axes, names[-1]) if names else self.num_ranks
        if self.num_holders > self.copies:
            near = max(near, chips_per_node)
        return Group(self.num_holders, near)

    @property
    def num_ranks(self) -> int:
        """Of the mesh."""
        return prod(size for name, size in self.axes if not DIVISIONS[name].borrowed)

    @property
    def reduces_each_backward(self) -> bool:
        """Level 2 need not wait for other pipelines to send gradients where they are summed."""
        return self.zero == 2 and self.pipelines == 1


def by_layer(choice: StageChoice) -> list[StageChoice]:
    """A stage in parts: the embedding where it has one, every layer, the head."""
    layers = [
        choice.holding((n, n + 1), embeds=False, predicts=False) for n in range(*choice.work.layers)
    ]
    first = [choice.holding((0, 0), embeds=True, predicts=False)] * choice.work.embeds
    last = [choice.holding((0, 0), embeds=False, predicts=True)] * choice.work.predicts
    return [*first, *layers, *last]


def dtype_of(precision: Precision) -> Dtype:
    """In which products are computed, of those that chips' rates are known for."""
    return "bf16" if width_of(precision) == 2 else "fp32"


def choice_of(
    pipeline: PipelinePlan,
    number: int,
    seq_len: int,
    num_pipelines: int = 1,
    training: Training = ALL_BY_ADAMW,
) -> StageChoice:
    """Of a planned stage.

    Args:
        num_pipelines: Of the whole plan.
    """
    stage = pipeline.stages[number]
    axes = tuple((name, size) for name, size in stage.mesh.axes if size > 1)
    samples = ceil(pipeline.microbatch / share(axes, "samples"))
    return StageChoice(
        work=StageWork(
            layers=stage.layers,
            embeds=number == 0,
            predicts=number == len(pipeline.stages) - 1,
            samples=ceil(samples / stage.passes),
            seq_len=seq_len,
            axes=dividing(axes),
            recompute=stage.recompute,
            dtype=dtype_of(stage.precision),
            eager=stage.device == "cpu",
        ),
        axes=axes,
        passes=stage.passes,
        pipelines=num_pipelines,
        state=training.state(stage.precision),
        trained=training.parts(stage.layers),
        zero=stage.zero,
    )
