"""Keep a block's input instead of its activations, and compute it again in backward."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    """A block whose activations are recomputed in backward. The same numbers, bit for bit.

    Weft's dropout is a function of sample and position, so there is no random state to restore.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Tensor) -> Tensor:
        result: Tensor = checkpoint(
            self.block, *args, use_reentrant=False, preserve_rng_state=False
        )
        return result
