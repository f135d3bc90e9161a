"""Keep a block's input instead of its activations, and compute it again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    """A block whose activations are recomputed in backward. The same numbers, bit for bit.

    ``draws``: it takes random numbers from PyTorch, whose state is then restored. Weft's own
    dropout is a function of sample and position and needs none of that.
    """

    def __init__(self, block: Callable[..., Any], *, draws: bool = False) -> None:
        super().__init__()
        self.block = block
        self._draws = draws

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, preserve_rng_state=self._draws)
