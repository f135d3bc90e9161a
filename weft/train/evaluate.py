"""Loss on held-out text, computed by every rank of the job together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from weft.data.batch import Dataset, spread
from weft.train.build import objective
from weft.train.loop import Run
from weft.train.microbatch import cut


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``loss`` in nats: the mean over ``tokens`` held-out targets of weight above 0."""

    loss: float
    tokens: int


def held_out_positions(num_samples: int, limit: int | None) -> np.ndarray:
    """The held-out samples that every evaluation of a run looks at."""
    return spread(num_samples, limit)


@torch.no_grad()
def evaluate(run: Run, data: Dataset, positions: np.ndarray) -> Evaluation:
    """Loss over the samples at ``positions``, shared among ranks as training batches are.

    Collective. The result is the same on every rank.
    """
    sums = objective(run.built.model)
    ranges = run.plan.seat(run.comm.rank).microbatches()
    totals = torch.zeros(3, dtype=torch.float64, device=run.comm.device)
    for low in range(0, len(positions), run.plan.global_batch):
        window = positions[low : low + run.plan.global_batch]
        parts = [window[part.start : part.stop] for part in ranges]
        batch = data.batch(np.concatenate(parts))
        for micro in cut(batch, [len(part) for part in parts], run.comm.device):
            result = sums(micro)
            totals[0] += result.loss
            totals[1] += result.weight
            totals[2] += micro.weights.count_nonzero()
    run.comm.all_reduce(totals, name="evaluation totals")
    loss, weight, tokens = totals.tolist()
    return Evaluation(loss / weight if weight else 0.0, int(tokens))
