"""Attention whose queries, keys and values come through few channels (MLA, arXiv 2405.04434)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.nn.causal_attention import causal_attention
from weft.nn.documents import Packed
from weft.nn.norm import RMSNorm
from weft.nn.rope import Rotation, rotate
from weft.nn.stage import Part
from weft.plan.model import LatentSpec


class LatentAttention(nn.Module):
    """Multi-head attention; the last channels of each head's query and key have a position, and
    those of keys are one for all heads.

    The number of heads is read off the weights, so a module that holds some heads only works.
    """

    def __init__(
        self,
        d_model: int,
        d_head: int,
        latent: LatentSpec,
        *,
        num_heads: int,
        sharpness: float,
    ) -> None:
        """``d_head``: channels of a head's query and key, those with a position among them.
        ``sharpness``: what queries and keys are multiplied by."""
        super().__init__()
        self.causal = True
        """Tokens see earlier ones alone."""
        self._d_head, self._latent, self._factor = d_head, latent, sharpness**2
        queries, d_nope = num_heads * d_head, d_head - latent.d_rope
        if latent.q_rank:
            self.q_down = nn.Linear(d_model, latent.q_rank, bias=False)
            self.q_norm = RMSNorm(latent.q_rank, latent.norm_eps)
            self.q_up = nn.Linear(latent.q_rank, queries, bias=False)
        else:
            self.q = nn.Linear(d_model, queries, bias=False)
        self.kv_down = nn.Linear(d_model, latent.kv_rank + latent.d_rope, bias=False)
        self.kv_norm = RMSNorm(latent.kv_rank, latent.norm_eps)
        self.kv_up = nn.Linear(latent.kv_rank, num_heads * (d_nope + latent.d_value), bias=False)
        self.o = nn.Linear(num_heads * latent.d_value, d_model, bias=False)
        self.core = Part(causal_attention)

    def forward(self, x: Tensor, turn: Rotation, packed: Packed | None) -> Tensor:
        """``x`` and result: ``[batch, seq, d_model]``; the rest is as of ``Attention``."""
        d_rope, d_nope = self._latent.d_rope, self._d_head - self._latent.d_rope
        queries = self.q_up(self.q_norm(self.q_down(x))) if self._latent.q_rank else self.q(x)
        q, q_turned = queries.unflatten(-1, (-1, self._d_head)).split((d_nope, d_rope), dim=-1)
        low, k_turned = self.kv_down(x).split((self._latent.kv_rank, d_rope), dim=-1)
        both = self.kv_up(self.kv_norm(low)).unflatten(-1, (-1, d_nope + self._latent.d_value))
        k, v = both.split((d_nope, self._latent.d_value), dim=-1)  # [batch, seq, heads, ..]
        q = torch.cat((q, _turned(q_turned, turn)), dim=-1)
        one_key = _turned(k_turned[:, :, None], turn)  # [batch, seq, 1, d_rope]
        k = torch.cat((k, one_key.expand(*k.shape[:3], d_rope)), dim=-1)
        mixed = self.core(q * self._factor if self._factor != 1 else q, k, v, packed)
        result: Tensor = self.o(mixed.flatten(2))
        return result


def _turned(x: Tensor, turn: Rotation) -> Tensor:
    """Of ``[batch, seq, heads, d_rope]`` pairs lie side by side: queries and keys may have them in
    halves instead, both alike."""
    return rotate(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1), turn)
