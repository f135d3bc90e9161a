"""Batches of the data pipeline as tensors of one rank's device, cut into its microbatches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from weft.data.batch import Batch
from weft.nn.context import Context
from weft.nn.stage import MicroBatch


def cut(
    batch: Batch,
    sizes: Sequence[int],
    device: torch.device,
    *,
    dropout_seed: tuple[int, int] | None = None,
) -> list[MicroBatch]:
    """Microbatches of ``sizes`` consecutive samples each.

    ``dropout_seed`` is (seed, step) where the model drops activations, else None.
    """
    assert sum(sizes) == len(batch.samples), f"{sizes} do not cut {len(batch.samples)} samples"
    result = []
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        result.append(_microbatch(batch, rows, device, dropout_seed))
        start += size
    return result


def _microbatch(
    batch: Batch, rows: slice, device: torch.device, dropout_seed: tuple[int, int] | None
) -> MicroBatch:
    keys = None
    if dropout_seed is not None:
        from weft.nn.dropout import dropout_keys

        keys = dropout_keys(*dropout_seed, torch.from_numpy(batch.samples[rows])).to(device)
    positions = torch.arange(batch.tokens.shape[1], device=device)[None]
    segments = None if batch.segments is None else _tensor(batch.segments[rows], device)
    tensors = {
        "tokens": _tensor(batch.tokens[rows], device).long(),
        "targets": _tensor(batch.targets[rows], device).long(),
        "weights": _tensor(batch.weights[rows], device),
    }
    return MicroBatch(tensors, Context(positions=positions, segments=segments, dropout_keys=keys))


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
