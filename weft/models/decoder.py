"""What the trainer needs of a model family: one stage of a decoder-only language model."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from weft.nn.context import Context


class Decoder(nn.Module, ABC):
    """Some consecutive layers, with or without the embedding before and the head after them.

    Parameters carry their logical names whatever the stage holds.
    """

    layers: nn.ModuleDict
    """The blocks held, by layer number: what recompute and compile apply to one by one."""

    @abstractmethod
    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Tokens ``[batch, seq]`` int64 where the stage embeds, else ``[batch, seq, d_model]``.

        The result is ``[batch, seq, d_model]``, after the final norm where the stage has the head.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """``[batch, seq, d_model]`` to ``[batch, seq, vocab]``. Needs the head."""

    @abstractmethod
    def loss(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """``sum(weights * cross-entropy)`` over ``[batch, seq]``: a scalar sum, never a mean."""

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The layers held, in order: what recompute and compile apply to one by one."""
