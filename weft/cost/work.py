"""What one rank of one stage computes: the part of a choice that operations and activations know.

Axes are named here nowhere but in the table of what they divide: operations ask into how many parts
a logical dimension is cut, whoever cuts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from weft.cluster.cluster import Dtype
from weft.models.shape import ModelShape
from weft.plan.plan import ZeroLevel

Keep = Literal["off", "selective", "half", "full"]
"""What is computed again in backward: nothing, the attention's core, every other layer, or all."""
Dim = Literal["samples", "seq", "heads", "kv_heads", "d_ff", "vocab", "experts"]
"""A logical dimension of parameters or activations."""
Form = Literal["stream", "inner"]
"""Of activations: as they travel between modules, or as a module computes with them."""
Axes = tuple[tuple[str, int], ...]
"""Sizes above 1 by name, outermost first."""


@dataclass(frozen=True, slots=True)
class Division:
    """What an axis divides."""

    stream: frozenset[Dim]
    inner: frozenset[Dim]
    """Parameters are divided along the same dimensions."""
    borrowed: bool = False
    """Its ranks are those of other axes."""

    def of(self, form: Form) -> frozenset[Dim]:
        """The dimensions of one form."""
        return self.stream if form == "stream" else self.inner

    @property
    def copies(self) -> bool:
        """Its ranks hold the same parameters."""
        return self.inner <= {"samples", "seq"}


DIVISIONS: dict[str, Division] = {
    "dp": Division(frozenset({"samples"}), frozenset({"samples"})),
    "cp": Division(frozenset({"seq"}), frozenset({"seq"})),
    "tp": Division(frozenset({"seq"}), frozenset({"heads", "kv_heads", "d_ff", "vocab"})),
    "ep": Division(frozenset(), frozenset({"experts"}), borrowed=True),
}


@lru_cache(maxsize=1 << 14)
def share(axes: Axes, dim: Dim, form: Form = "inner") -> int:
    """Into how many parts the axes cut a dimension."""
    return prod(size for name, size in axes if dim in DIVISIONS[name].of(form))


@lru_cache(maxsize=1 << 12)
def stride(axes: Axes, name: str) -> int:
    """How far apart neighbours along an axis are, in ranks."""
    names = [axis for axis, _ in axes]
    inside = axes[names.index(name) + 1 :]
    return prod(size for axis, size in inside if not DIVISIONS[axis].borrowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """Layers, and how one rank computes its part of them."""

    layers: tuple[int, int]
    """Half-open range of decoder layers."""
    embeds: bool
    """The stage looks tokens up."""
    predicts: bool
    """The stage has the last norm, the head and the loss."""
    samples: float
    """Of a full microbatch, on this rank."""
    seq_len: int
    axes: Axes = ()
    """That divide more than samples."""
    sequence_parallel: bool = True
    """Between modules activations are divided as the axes say; else only inside them."""
    recompute: Keep = "off"
    dtype: Dtype = "bf16"
    """Of the weights' matrix products."""
    fused_attention: bool = True
    """Attention never writes its scores to memory (arXiv 2205.14135)."""
    frozen: bool = False
    """Weights are not trained, only small adapters beside them."""
    eager: bool = False
    """On a processor: attention in blocks of queries, the gate kept before and after its
    activation, and logits in chunks (``weft/nn``)."""

    def share(self, dim: Dim) -> int:
        """Into how many parts a dimension is cut, as modules compute with it."""
        return share(self.axes, dim)

    @property
    def wide(self) -> float:
        """Bytes of one activation."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def tokens(self) -> float:
        """Of one microbatch on this rank, inside a module."""
        return self.samples * self.seq_len / share(self.axes, "seq")

    @property
    def rows(self) -> float:
        """Of one microbatch on this rank, between modules."""
        if not self.sequence_parallel:
            return self.tokens
        return self.tokens / (share(self.axes, "seq", "stream") // share(self.axes, "seq"))

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]


@lru_cache(maxsize=1 << 12)
def layers_by_kind(shape: ModelShape, layers: tuple[int, int]) -> tuple[tuple[bool, int], ...]:
    """(layers are mixtures of experts, how many), where there are any."""
    first, end = layers
    mixed = sum(shape.has_experts(layer) for layer in range(first, end))
    counts = (False, end - first - mixed), (True, mixed)
    return tuple((experts, number) for experts, number in counts if number)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes of one parameter at rest, by what they are."""

    weight: float
    grad: float
    optimizer: float
    """Moments, and a master copy where there is one."""


STATES: dict[str, StateBytes] = {
    "fp64": StateBytes(weight=8, grad=8, optimizer=16),
    "fp32": StateBytes(weight=4, grad=4, optimizer=8),
    "bf16": StateBytes(weight=2, grad=4, optimizer=12),
}
"""By a plan's precision: gradients add up in the main dtype, AdamW keeps two moments in it."""

SHARED_FROM: dict[str, ZeroLevel] = {"optimizer": 1, "grad": 2, "weight": 3}
"""The ZeRO level from which ranks share a part (arXiv 1910.02054)."""
