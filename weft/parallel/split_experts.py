"""Experts of which each rank has a part of every one."""

from __future__ import annotations

from torch import Tensor, nn

from weft.parallel.runtime import Sum


class SplitExperts(nn.Module):
    """Experts of whose hidden channels each rank has a part: all route alike, and terms are made
    complete. What is added to the loss is the same on each; its gradient is a part on each."""

    def __init__(self, experts: nn.Module, total: Sum) -> None:
        super().__init__()
        assert total.complete, f"{experts} give a term"
        self.experts = experts
        self._complete = total.complete
        self._ways = len(total.group.ranks)

    def forward(self, x: Tensor, *tasks: Tensor) -> tuple[Tensor, Tensor]:
        """``[batch, seq, d_model]`` to ``[batch, own seq, d_model]``, and a scalar."""
        y, added = self.experts(x, *tasks)
        constant = added.detach()
        return self._complete(y), constant + (added - constant) / self._ways
