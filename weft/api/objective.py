"""What a user's loss becomes: sums over the job, of losses that are not reduced."""

from __future__ import annotations

import torch

from weft.nn.stage import Term, Terms, Tree


def weighted_sum(output: Tree, _batch: Tree, /) -> Terms:
    """``losses`` of any shape, with ``weights`` of the same or, without any, all counting one."""
    losses, weights = output["losses"], output.get("weights")
    if weights is None:
        count = torch.full((), losses.numel(), dtype=torch.float64, device=losses.device)
        return {"loss": Term(losses.sum(), count)}
    return {"loss": Term((losses * weights).sum(), weights.sum(dtype=torch.float64))}
