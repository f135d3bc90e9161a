"""Loss on held-out text, computed by every rank of the job together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from weft.data.batch import Dataset, spread
from weft.train.loop import Run
from weft.train.microbatch import cut


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``loss`` in nats: the weighted mean over held-out targets; ``tokens``: their weight."""

    loss: float
    tokens: int


def held_out_positions(num_samples: int, limit: int | None) -> np.ndarray:
    """The held-out samples that every evaluation of a run looks at."""
    return spread(num_samples, limit)


def evaluate(run: Run, data: Dataset, positions: np.ndarray) -> Evaluation:
    """Loss over the samples at ``positions``, shared among ranks as training batches are.

    Collective. The result is the same on every rank.
    """
    ranges = run.plan.seat(run.comm.rank).microbatches()
    totals = torch.zeros(2, dtype=torch.float64, device=run.comm.device)
    for low in range(0, len(positions), run.plan.global_batch):
        window = positions[low : low + run.plan.global_batch]
        filled = np.resize(window, run.plan.global_batch)
        parts = [filled[part.start : part.stop] for part in ranges]
        batch = data.batch(np.concatenate(parts))
        is_real = np.concatenate([np.arange(p.start, p.stop) < len(window) for p in ranges])
        batch.weights[~is_real] = 0
        sizes = [len(part) for part in parts]
        totals += run.built.executor.evaluate(cut(batch, sizes, run.comm.device))
    run.comm.all_reduce(totals, name="evaluation totals")
    loss, weight = totals.tolist()
    return Evaluation(loss / weight if weight else 0.0, round(weight))
