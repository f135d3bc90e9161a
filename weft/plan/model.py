"""What a plan knows of a model: its sizes and its parameters by logical name. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import floor, prod
from typing import Any, Literal, Self

from weft.plan.borders import INSIDE, Place


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Stretching of rotary positions beyond the length first trained on, a formula a kind.

    ``weft.nn.rope_scaling`` has them. What a kind has no use for keeps its default.
    """

    kind: Literal["linear", "dynamic", "yarn", "llama3"] = "llama3"
    factor: float
    original_seq_len: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSpec:
    """Attention through low ranks (arXiv 2405.04434): of each head's query and key some channels
    have a position."""

    kv_rank: int
    """Channels that keys and values are made of."""
    q_rank: int = 0
    """Likewise queries; 0: these are made of the hidden state."""
    d_rope: int
    """Channels with a position; keys have one set for all heads."""
    d_value: int
    """Of one head's value."""
    norm_eps: float = 1e-6
    """Of the norms of what is of low rank; published code fixes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """Experts in place of every layer's feed-forward."""

    count: int
    top_k: int
    """Those that a token goes to; where experts choose, on average."""
    choice: Literal["tokens", "experts"] = "tokens"
    """Who chooses: each token its experts, or each expert its tokens of every sample."""
    capacity: float | None = None
    """An expert takes this many times its even share of the choices of a sample, the earliest ones;
    None: all."""
    tasks: int = 0
    """A gate's scores are of a sample's task, of so many, and not of a token; 0: of a token."""
    d_ff: int = 0
    """Width of each; 0: the feed-forward's."""
    dense_layers: int = 0
    """The first so many layers have a feed-forward and no experts."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normed: bool = True
    """The shares of those add up to one."""
    groups: int = 1
    """Consecutive ones, as many each."""
    top_groups: int = 1
    """Those that a token's experts are of: where the two greatest scores add up to most."""
    scale: float = 1.0
    """Shares are multiplied by it."""
    bias_step: float | None = None
    """By how much a step moves each expert's bias, which is added to scores for the choice alone
    (arXiv 2408.15664); None: there is none."""
    shared_d_ff: int = 0
    """Width of one that every token visits besides; 0: none."""
    shared_gate: bool = True
    """That one's result is multiplied by what a gate of its own says."""
    balance: float = 0.0
    """Factor of the loss of unequal loads (``weft.nn.experts.gates.balance_loss``)."""
    z: float = 0.0
    """Factor of the loss of large logits (``z_loss``)."""
    imbalance: float = 1.0
    """Tokens of the most visited one over the mean of a layer, as far as it is expected: costs know
    of it, and no number depends on it."""

    def room(self, seq_len: int) -> int | None:
        """Tokens of one sample that an expert takes at most; None: all that choose it."""
        times = 1.0 if self.choice == "experts" else self.capacity
        return None if times is None else floor(times * self.top_k * seq_len / self.count + 1e-9)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec(ABC):
    """What the description of every model offers; a family's own has the fields that it needs."""

    family: str
    """Folder under ``weft.models``, or the name under which a family was added."""
    d_model: int
    """Channels of what goes from one layer to the next."""
    num_layers: int
    """Blocks, which a plan gives to its stages."""
    vocab_size: int
    """Tokens that samples are made of."""
    seq_len: int
    """Longest sequence the model is meant for."""
    dropout: float = 0.0

    @abstractmethod
    def reduced(self) -> Self:
        """A model of the same kind, heads and all, that a rehearsal runs in a moment."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What ``dataclasses.asdict`` gave. Raises TypeError for fields that do not fit."""
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Init:
    """How a parameter starts. ``std`` is used by ``normal`` alone."""

    kind: Literal["normal", "ones", "zeros"]
    std: float = 0.0


UnitName = Place | Literal["embed", "head"]
"""A unit of a model: a layer's number, what comes before the layers, or what comes after them. The
second part of a layer that a plan cuts is a unit of its own, called by its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """One logical parameter: every rank knows all of them, whatever it holds itself."""

    name: str
    """Dotted name in the unsplit model, e.g. ``layers.3.attn.q.weight``."""
    shape: tuple[int, ...]
    unit: UnitName
    """The unit that it belongs to."""
    init: Init
    decay: bool
    """Weight decay applies: matrices, not norms, biases or embeddings."""
    also: tuple[UnitName, ...] = ()
    """Further units that use the same parameter (a tied head, a shared layer)."""
    trainable: bool = True
    """Updates change it; a frozen one has no gradient and no state."""
    fp8: bool = True
    """A linear layer with it multiplies in eight bits, where the precision has products that do."""
    inside: bool = False
    """It belongs to the second part of its layer."""
    of_experts: bool = False
    """Its first dimension is the experts of a layer."""
    settled: bool = False
    """Not updates change it, but what forwards counted in a step; in fp32 at least."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Of a layer, or one of each of its experts."""
        return isinstance(self.unit, int) and len(self.shape) == 2 + self.of_experts

    @property
    def units(self) -> set[UnitName]:
        """All that compute with it."""
        return {self.unit, *self.also}

    @property
    def places(self) -> set[UnitName]:
        """Likewise, and if it is in the second part of a layer, where that begins."""
        if not self.inside or isinstance(self.unit, str):
            return self.units
        return {self.unit + INSIDE, *self.also}
