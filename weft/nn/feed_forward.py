"""Feed-forward blocks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from weft.nn.stage import Part


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)
        self.activation, self.by_token = Part(self._activate), Part(self._feed)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and result: ``[batch, seq, d_model]``; hidden: ``[batch, seq, d_ff]``."""
        result: Tensor = self.by_token(x)
        return result

    def _feed(self, x: Tensor) -> Tensor:
        result: Tensor = self.activation(self.gate(x), self.up(x))
        return result

    def _activate(self, gate: Tensor, up: Tensor) -> Tensor:
        hidden: Tensor = self.down(F.silu(gate) * up)
        return hidden


class GeluMLP(nn.Module):
    """``down(gelu(up(x)))`` with biases and the tanh form of GELU, as in GPT-2."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff)
        self.down = nn.Linear(d_ff, d_model)
        self.activation, self.by_token = Part(self._activate), Part(self._feed)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and result: ``[batch, seq, d_model]``; hidden: ``[batch, seq, d_ff]``."""
        result: Tensor = self.by_token(x)
        return result

    def _feed(self, x: Tensor) -> Tensor:
        result: Tensor = self.activation(self.up(x))
        return result

    def _activate(self, up: Tensor) -> Tensor:
        hidden: Tensor = self.down(F.gelu(up, approximate="tanh"))
        return hidden
