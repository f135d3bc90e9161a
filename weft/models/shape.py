"""What a transformer is made of, as far as its cost goes: sizes and parameters. No torch.

A family gives the shape of each of its models (``Family.shape``), and the packages above, which
compute costs, ask for it by ``registry.shape_of`` and know no family. A shape also describes
models that others trained: mixtures of experts, latent attention, any biases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Branch = Literal["attention", "feed_forward"]
"""One of the parts of a layer between which a stage may end; of one that has both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShape:
    """The feed-forward of a mixture-of-experts layer (arXiv 2101.03961)."""

    num_experts: int
    top_k: int
    """Experts that each token visits."""
    d_ff: int
    """Of one expert."""
    shared_d_ff: int = 0
    """Of an expert that every token visits besides."""
    num_vectors: float = 0.0
    """Biases and gates of one row, in multiples of ``d_model``."""
    dense_layers: int = 0
    """The first so many layers have an ordinary feed-forward."""
    imbalance: float = 1.0
    """Tokens of the most visited one over the mean, as far as it is expected."""
    most_nodes: int = 0
    """A token crosses to so many nodes at most, to each once, however many of its experts there
    take it; 0: to every expert by itself."""

    def busiest(self, own: float) -> float:
        """Tokens of the rank with the most visited of them, among so many of its own, over the mean
        of ranks: the others have alike what it leaves."""
        if own >= self.num_experts:
            return 1.0
        others = (self.num_experts - self.imbalance) / (self.num_experts - 1)
        return (self.imbalance + (own - 1) * others) / own


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Keys, values and queries through low ranks (arXiv 2405.04434)."""

    q_rank: int
    """0: queries come through none."""
    kv_rank: int
    d_nope: int
    """Channels of a head's key without position."""
    d_rope: int
    """Channels with position, one key for all heads."""
    d_value: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a model. Hashable, so that costs can be kept by shape."""

    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    """0, with ``num_kv_heads`` and ``d_head``: layers are feed-forwards without attention."""
    num_kv_heads: int
    d_head: int
    vocab_size: int
    gated: bool
    """The feed-forward has a gate: three matrices, not two."""
    tied: bool = False
    num_positions: int = 0
    """Rows of a learned table of positions."""
    num_vectors: float = 0.0
    """Norm weights and biases of a layer, in multiples of ``d_model``."""
    norm_bias: bool = False
    """The last norm has a bias too."""
    dropout: bool = False
    causal: bool = True
    """Tokens see earlier ones alone."""
    experts: ExpertShape | None = None
    latent: LatentAttention | None = None

    vectors_inside: float = 0.0
    """Those of ``num_vectors`` that are in a layer's second part."""

    @property
    def rotates(self) -> bool:
        """Queries and keys are turned by their positions, which no table has."""
        return bool(self.num_heads) and not self.num_positions

    @property
    def seen(self) -> float:
        """The part of a sequence that a token sees, on average."""
        return 0.5 if self.causal else 1.0

    @property
    def attention_params(self) -> int:
        """Matrices of one layer's attention."""
        out = self.num_heads * self.value_width * self.d_model
        if self.latent is None:
            return self.d_model * self.d_head * (self.num_heads + 2 * self.num_kv_heads) + out
        low = self.latent
        query = (self.d_model if not low.q_rank else low.q_rank) * self.num_heads * self.key_width
        query += self.d_model * low.q_rank
        down = self.d_model * (low.kv_rank + low.d_rope)
        up = low.kv_rank * self.num_heads * (low.d_nope + low.d_value)
        return query + down + up + out

    @property
    def whole_attention_params(self) -> int:
        """Those of them that no rank has a part of: products to low ranks."""
        low = self.latent
        return 0 if low is None else self.d_model * (low.q_rank + low.kv_rank + low.d_rope)

    @property
    def branches(self) -> int:
        """Of a layer, each with a norm before it and an addition after it."""
        return 2 if self.num_heads else 1

    @property
    def key_width(self) -> int:
        """Channels of one head's query and key."""
        return self.d_head if self.latent is None else self.latent.d_nope + self.latent.d_rope

    @property
    def value_width(self) -> int:
        """Channels of one head's value."""
        return self.d_head if self.latent is None else self.latent.d_value

    @property
    def num_matrices(self) -> int:
        """Of one feed-forward."""
        return 3 if self.gated else 2

    @property
    def dense_layers(self) -> int:
        """First layers that have no experts, of a model whose others have."""
        return 0 if self.experts is None else self.experts.dense_layers

    def has_experts(self, layer: int) -> bool:
        """The layer's feed-forward is a mixture of experts."""
        return self.experts is not None and layer >= self.dense_layers

    def dense_params(self, layer: int, branch: Branch | None = None) -> float:
        """Parameters of a layer, or of one part of it, that every token uses."""
        if branch == "attention":
            return self.attention_params + (self.num_vectors - self.vectors_inside) * self.d_model
        if branch == "feed_forward":
            return self.dense_params(layer) - self.dense_params(layer, "attention")
        d_ff: float = self.d_ff
        if self.experts is not None and self.has_experts(layer):
            d_ff = self.experts.shared_d_ff + self.experts.num_experts / self.num_matrices
            d_ff += self.experts.num_vectors / self.num_matrices
        vectors = self.num_vectors * self.d_model
        return self.attention_params + self.num_matrices * self.d_model * d_ff + vectors

    def expert_params(self, layer: int) -> float:
        """Parameters of a layer's experts, all of them."""
        if self.experts is None or not self.has_experts(layer):
            return 0.0
        return self.num_matrices * self.d_model * self.experts.d_ff * self.experts.num_experts

    @property
    def table_params(self) -> int:
        """One matrix of the vocabulary."""
        return self.vocab_size * self.d_model

    @property
    def norm_params(self) -> int:
        """Of the last norm."""
        return self.d_model * (2 if self.norm_bias else 1)

    @property
    def params(self) -> float:
        """All parameters; a tied table counts once. The last norm is one of them."""
        layers = sum(
            self.dense_params(layer) + self.expert_params(layer) for layer in range(self.num_layers)
        )
        tables = self.table_params * (1 if self.tied else 2)
        return layers + tables + self.num_positions * self.d_model + self.norm_params
