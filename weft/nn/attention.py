"""Causal self-attention with grouped key and value heads."""

from __future__ import annotations

from torch import Tensor, nn

from weft.nn.causal_attention import causal_attention
from weft.nn.documents import Packed
from weft.nn.norm import RMSNorm
from weft.nn.rope import Rotation, rotate
from weft.nn.stage import Part


class Attention(nn.Module):
    """Multi-head attention; ``num_heads / num_kv_heads`` queries share a key and a value head.

    The number of heads is read off the weights, so a module that holds some heads only works.
    """

    def __init__(
        self,
        d_model: int,
        d_head: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.d_head = d_head
        self.q = nn.Linear(d_model, num_heads * d_head, bias=bias)
        self.k = nn.Linear(d_model, num_kv_heads * d_head, bias=bias)
        self.v = nn.Linear(d_model, num_kv_heads * d_head, bias=bias)
        self.o = nn.Linear(num_heads * d_head, d_model, bias=out_bias)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(d_head, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(d_head, qk_norm_eps)
        self.core = Part(causal_attention)

    def forward(self, x: Tensor, turn: Rotation | None, packed: Packed | None) -> Tensor:
        """``x`` and result: ``[batch, seq, d_model]``.

        ``turn`` rotates queries and keys (None: no rotary positions); ``packed`` says where
        documents begin (None: one a sample).
        """
        q = self.q(x).unflatten(-1, (-1, self.d_head))  # [batch, seq, heads, d_head]
        k = self.k(x).unflatten(-1, (-1, self.d_head))
        v = self.v(x).unflatten(-1, (-1, self.d_head))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        result: Tensor = self.o(self.core(q, k, v, packed).flatten(2))
        return result
