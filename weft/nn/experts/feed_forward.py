"""The layer: a gate and experts, with or without one expert that every token visits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.nn.experts.gates import GATES, balance_loss, routed, z_loss
from weft.nn.experts.grouped import by_expert, grouped_product, spread, together
from weft.nn.feed_forward import SwiGLU
from weft.nn.norm import wide_dtype


class Gate(nn.Module):
    """A token's scores, in fp32 (fp64 in fp64) whatever it is computed in."""

    def __init__(self, d_model: int, num_experts: int, scores: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        self._scores = GATES[scores]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``[batch, seq, d_model]`` to logits and scores, ``[batch, seq, experts]`` each."""
        wide = wide_dtype(x)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        return logits, self._scores(logits)


class Expert(nn.Module):
    """One linear layer of all experts, stacked: ``weight`` is ``[experts, d_out, d_in]``."""

    def __init__(self, num_experts: int, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, d_out, d_in))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """As ``grouped_product``."""
        return grouped_product(x, self.weight, ends)


class SharedExpert(nn.Module):
    """A SwiGLU for every token, times ``sigmoid(gate(x))`` (Qwen 1.5 MoE)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.ff = SwiGLU(d_model, d_ff)
        self.gate = nn.Linear(d_model, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and result: ``[batch, seq, d_model]``."""
        result: Tensor = torch.sigmoid(self.gate(x)) * self.ff(x)
        return result


class Experts(nn.Module):
    """SwiGLUs of which each token visits ``top_k``. Nothing is dropped.

    ``balance`` and ``z`` are factors of ``balance_loss`` and ``z_loss``.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        num_experts: int,
        top_k: int,
        scores: str,
        normed: bool,
        shared_d_ff: int,
        losses: tuple[float, float],
    ) -> None:
        super().__init__()
        self._top_k, self._normed = top_k, normed
        self._balance, self._z = losses
        self.router = Gate(d_model, num_experts, scores)
        self.gate = Expert(num_experts, d_model, d_ff)
        self.up = Expert(num_experts, d_model, d_ff)
        self.down = Expert(num_experts, d_ff, d_model)
        self.shared = SharedExpert(d_model, shared_d_ff) if shared_d_ff else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``[batch, seq, d_model]`` to as much, and what is added to the loss of its tokens, a
        scalar in fp32 or fp64; 0 where gradients are off, for that is no error of the model."""
        logits, scores = self.router(x)
        chosen, shares = routed(scores.flatten(0, 1), self._top_k, normed=self._normed)
        order = by_expert(chosen, scores.shape[-1])
        rows = spread(x.flatten(0, 1), order)
        hidden = F.silu(self.gate(rows, order.ends)) * self.up(rows, order.ends)
        y = together(self.down(hidden, order.ends), shares, order).view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        more = logits.new_zeros(())
        if torch.is_grad_enabled() and self._balance:
            more = more + self._balance * balance_loss(scores, chosen.view(*x.shape[:2], -1))
        if torch.is_grad_enabled() and self._z:
            more = more + self._z * z_loss(logits)
        return y, more
