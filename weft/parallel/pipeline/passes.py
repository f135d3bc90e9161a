"""A stage that cuts its part of a microbatch into smaller ones.

What one pass computes with and drops is smaller; what is kept for backward stays, unless it is
recomputed.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from weft.nn.context import Context
from weft.parallel.pipeline.executor import Stage
from weft.plan.tiling import split_evenly


class InPasses(nn.Module):
    """Computes a stage's samples in ``passes`` consecutive parts. The numbers are the same.

    Fewer samples than passes make as many passes as there are samples.
    """

    def __init__(self, stage: Stage, passes: int) -> None:
        super().__init__()
        self.stage = stage
        self.passes = passes

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """As the stage's: ``[batch, seq]`` tokens or ``[batch, seq, d_model]``."""
        parts = self._parts(len(x))
        return torch.cat([self.stage(x[rows], _part_of(context, rows)) for rows in parts])

    def loss(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """The sum over the parts."""
        losses = [
            self.stage.loss(hidden[rows], targets[rows], weights[rows])
            for rows in self._parts(len(hidden))
        ]
        return torch.stack(losses).sum()

    def _parts(self, samples: int) -> list[slice]:
        sizes = [size for size in split_evenly(samples, self.passes) if size]
        starts = accumulate(sizes, initial=0)
        return [slice(low, low + size) for low, size in zip(starts, sizes, strict=False)]


def _part_of(context: Context, rows: slice) -> Context:
    """What is known of some of the samples."""
    positions, segments, keys = context.positions, context.segments, context.dropout_keys
    return replace(
        context,
        positions=positions if positions is None or len(positions) == 1 else positions[rows],
        segments=None if segments is None else segments[rows],
        dropout_keys=None if keys is None else keys[rows],
    )
