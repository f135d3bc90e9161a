"""Self-attention with grouped key and value heads."""

from __future__ import annotations

from torch import Tensor, nn

from weft.nn.causal_attention import causal_attention
from weft.nn.documents import Packed
from weft.nn.full_attention import full_attention
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
        norms_all_heads: bool = False,
    ) -> None:
        super().__init__()
        self.d_head = d_head
        self.causal = True
        """Tokens see earlier ones alone."""
        self.q = nn.Linear(d_model, num_heads * d_head, bias=bias)
        self.k = nn.Linear(d_model, num_kv_heads * d_head, bias=bias)
        self.v = nn.Linear(d_model, num_kv_heads * d_head, bias=bias)
        self.o = nn.Linear(num_heads * d_head, d_model, bias=out_bias)
        heads = (num_heads, num_kv_heads) if norms_all_heads else (1, 1)
        self._norms_all_heads = norms_all_heads
        self.q_norm, self.k_norm = (
            None if qk_norm_eps is None else RMSNorm(many * d_head, qk_norm_eps) for many in heads
        )
        self.core = Part(causal_attention)

    def both_ways(self) -> None:
        """Let tokens see all of their document, as in encoders."""
        self.causal, self.core.call = False, full_attention

    def forward(self, x: Tensor, turn: Rotation | None, packed: Packed | None) -> Tensor:
        """``x`` and result: ``[batch, seq, d_model]``.

        ``turn`` rotates queries and keys (None: no rotary positions); ``packed`` says where
        documents begin (None: one a sample).
        """
        q = self._normed(self.q(x), self.q_norm)  # [batch, seq, heads, d_head]
        k = self._normed(self.k(x), self.k_norm)
        v = self.v(x).unflatten(-1, (-1, self.d_head))
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        result: Tensor = self.o(self.core(q, k, v, packed).flatten(2))
        return result

    def _normed(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """``[batch, seq, heads * d_head]`` to ``[batch, seq, heads, d_head]``."""
        if norm is not None and self._norms_all_heads:
            x = norm(x)
        heads: Tensor = x.unflatten(-1, (-1, self.d_head))  # type: ignore[no-untyped-call]
        return heads if norm is None or self._norms_all_heads else norm(heads)
