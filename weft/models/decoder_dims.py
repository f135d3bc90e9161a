"""The logical dimensions of a decoder-only transformer. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from weft.models.decoder_spec import DecoderSpec
from weft.plan.layout import SAMPLES, Dim, Edge, Layout


@dataclass(frozen=True, slots=True)
class DecoderDims:
    """What families of decoders call the dimensions of their tensors."""

    d_model: Dim
    d_ff: Dim
    d_head: Dim
    heads: Dim
    """The channels of all query heads; those that share a key head are one group."""
    kv_heads: Dim
    """The channels of all key (or value) heads."""
    vocab: Dim
    seq: Dim

    @staticmethod
    def of(spec: DecoderSpec) -> DecoderDims:
        keys, per_key = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
        words = f"{spec.num_heads} heads share {keys} key heads"
        heads, kv_heads = spec.num_heads * spec.d_head, keys * spec.d_head
        return DecoderDims(
            d_model=Dim(name="d_model", size=spec.d_model),
            d_ff=Dim(name="d_ff", size=spec.d_ff),
            d_head=Dim(name="d_head", size=spec.d_head),
            heads=Dim(name="heads", size=heads, groups=keys, units=per_key, words=words),
            kv_heads=Dim(name="kv_heads", size=kv_heads, groups=keys, shared=True),
            vocab=Dim(name="vocab", size=spec.vocab_size),
            seq=Dim(name="seq", size=spec.seq_len),
        )

    @property
    def hidden(self) -> tuple[Dim, ...]:
        """``[samples, seq, d_model]``: what goes from module to module, and over stage borders."""
        return (SAMPLES, self.seq, self.d_model)

    @property
    def enters(self) -> Edge:
        """Hidden states as they come into a module that computes with whole samples."""
        return Edge(self.hidden, "stream", "inner")

    @property
    def leaves(self) -> Edge:
        """Hidden states as such a module hands them on."""
        return Edge(self.hidden, "inner", "stream")

    @property
    def positions(self) -> Edge:
        """``[samples, seq]``: the places of tokens, for a module that computes with hidden states
        as they travel."""
        return Edge((SAMPLES, self.seq), "batch", "stream")

    def ends(self, *, tied: bool) -> dict[str, Layout]:
        """The vocabulary's tables: embedding, head and loss."""
        table = {"weight": (self.vocab, self.d_model)}
        ends = {
            "embed": Layout(
                params=table,
                sums=self.vocab,
                takes={0: Edge((SAMPLES, self.seq), "batch", "inner")},
                gives=self.leaves,
            ),
            "cross_entropy": Layout(takes={0: self.enters}, sums=self.vocab, mixes=self.seq),
        }
        return ends if tied else {**ends, "head": Layout(params=table)}
