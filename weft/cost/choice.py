"""What one stage of a pipeline may choose: the one description that all costs are asked about.

A stage of a plan, a mesh of a search and a line of a published table all become a ``StageChoice``.
Its memory is ``stage_memory``, its time ``stage_times``, what its layers send ``layer_sends``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, prod
from typing import NamedTuple

from weft.cluster.cluster import Dtype
from weft.cost.work import (
    DIVISIONS,
    STATES,
    Axes,
    Keep,
    StageWork,
    StateBytes,
    copies_in,
    dividing,
    share,
    stride,
)
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Precision, ZeroLevel

ALL = float("inf")


class Group(NamedTuple):
    """Ranks that talk: how many, and the distance between neighbours in the order of ranks."""

    size: int
    stride: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StageChoice:
    """Layers on a mesh of like chips, and how its ranks compute and keep them."""

    layers: tuple[int, int]
    """Half-open range of decoder layers."""
    embeds: bool
    """The stage looks tokens up."""
    predicts: bool
    """The stage has the last norm, the head and the loss."""
    samples: float
    """Of a pass of a full microbatch, on the rank with the most."""
    seq_len: int
    axes: Axes = ()
    """Sizes of the mesh, those above 1, outermost first."""
    passes: int = 1
    pipelines: int = 1
    """Side by side, which hold the same parameters, this one counted."""
    recompute: Keep = "off"
    dtype: Dtype = "bf16"
    """Of the weights' matrix products."""
    state: StateBytes = STATES["bf16"]
    zero: ZeroLevel = 0
    shard_ways: int = 0
    """Ranks, next to each other, that share what ``zero`` names; 0 is all that hold the same."""
    sequence_parallel: bool = True
    fused_attention: bool = True
    frozen: bool = False
    eager: bool = False
    """These four as in ``StageWork``."""
    overlap: float = ALL
    """Microbatches whose computing may hide gradients and parameters on their way."""
    key: int = field(init=False, repr=False, compare=False, default=0)
    """Its hash, which searches ask for often; 0 until then."""

    def __hash__(self) -> int:
        if not self.key:
            object.__setattr__(self, "key", self._hash())
        return self.key

    def _hash(self) -> int:
        held = self.layers, self.embeds, self.predicts, self.samples, self.passes, self.pipelines
        how = self.axes, self.recompute, self.dtype, self.state, self.zero, self.shard_ways
        rest = self.seq_len, self.sequence_parallel, self.fused_attention, self.frozen, self.eager
        return hash((held, how, rest, self.overlap))

    def holding(self, num_layers: int, embeds: bool, predicts: bool) -> StageChoice:
        """The same of a stage that holds so many layers."""
        return StageChoice(
            layers=(0, num_layers),
            embeds=embeds,
            predicts=predicts,
            samples=self.samples,
            seq_len=self.seq_len,
            axes=self.axes,
            passes=self.passes,
            pipelines=self.pipelines,
            recompute=self.recompute,
            dtype=self.dtype,
            state=self.state,
            zero=self.zero,
            shard_ways=self.shard_ways,
            sequence_parallel=self.sequence_parallel,
            fused_attention=self.fused_attention,
            frozen=self.frozen,
            eager=self.eager,
            overlap=self.overlap,
        )

    @property
    def work(self) -> StageWork:
        """What one rank computes in a pass of a full microbatch."""
        return StageWork(
            layers=self.layers,
            embeds=self.embeds,
            predicts=self.predicts,
            samples=self.samples,
            seq_len=self.seq_len,
            axes=dividing(self.axes),
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            dtype=self.dtype,
            fused_attention=self.fused_attention,
            frozen=self.frozen,
            eager=self.eager,
        )

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
    first, end = choice.layers
    parts = [
        replace(choice, layers=(n, n + 1), embeds=False, predicts=False) for n in range(first, end)
    ]
    if choice.embeds:
        parts.insert(0, replace(choice, layers=(0, 0), predicts=False))
    if choice.predicts:
        parts.append(replace(choice, layers=(0, 0), embeds=False))
    return parts


def dtype_of(precision: Precision) -> Dtype:
    """In which products are computed, of those that chips' rates are known for."""
    return "bf16" if precision == "bf16" else "fp32"


def axes_of(mesh: Mesh) -> Axes:
    """Sizes of a mesh as a choice has them."""
    return tuple((name, size) for name, size in mesh.axes if size > 1)


def choice_of(
    pipeline: PipelinePlan, number: int, seq_len: int, num_pipelines: int = 1
) -> StageChoice:
    """Of a planned stage.

    Args:
        num_pipelines: Of the whole plan.
    """
    stage = pipeline.stages[number]
    axes = axes_of(stage.mesh)
    samples = ceil(pipeline.microbatch / share(axes, "samples"))
    return StageChoice(
        layers=stage.layers,
        embeds=number == 0,
        predicts=number == len(pipeline.stages) - 1,
        samples=ceil(samples / stage.passes),
        seq_len=seq_len,
        axes=axes,
        passes=stage.passes,
        pipelines=num_pipelines,
        recompute=stage.recompute,
        dtype=dtype_of(stage.precision),
        state=STATES[stage.precision],
        zero=stage.zero,
        eager=stage.device == "cpu",
    )
