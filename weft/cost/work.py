"""What one rank of one stage has to do: the one question that all costs are asked about.

A stage of a plan and a line of a published table both become a ``StageWork``; memory, operations
and time are functions of it and of the model's shape, so equal stages are costed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.cluster.cluster import Dtype
from weft.plan.plan import ZeroLevel

Keep = Literal["off", "selective", "half", "full"]
"""What is computed again in backward: nothing, the attention's core, every other layer, or all."""


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
    tp: int = 1
    cp: int = 1
    ep: int = 1
    """Ranks that share the experts, of those along ``dp`` and ``cp``."""
    sequence_parallel: bool = True
    """Norms and residuals are split along the sequence over ``tp``."""
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

    @property
    def wide(self) -> float:
        """Bytes of one activation."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def tokens(self) -> float:
        """Of one microbatch on this rank, before ``tp`` splits anything."""
        return self.samples * self.seq_len / self.cp

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]


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
