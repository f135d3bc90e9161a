"""Sums of squares over whole logical tensors, however they are split: exact, in one reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.parallel.mains import MainParam


class TensorNorms:
    """Every element counts once, where it is owned: tensor-parallel parts, segments, pipelines.

    Args:
        names: Every parameter of the job that is trained, in the one order all ranks agree on.
    """

    def __init__(self, names: Sequence[str], comm: Comm) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._comm = comm
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def squares(
        self, mains: Sequence[MainParam], quantities: Sequence[Sequence[Tensor]]
    ) -> list[list[Tensor]]:
        """For each quantity, which has a tensor for each main, and each main: the sum of squares of
        the quantity over the main's whole logical tensor, an fp64 scalar on the device.

        Collective over all ranks of the job; one without mains gives empty quantities.
        """
        places = [self._places[main.spec.name] for main in mains]
        owned = [number for number, main in enumerate(mains) if main.owned]
        table = torch.zeros(
            len(quantities), len(self._places), dtype=torch.float64, device=self._comm.device
        )
        if owned:
            index = self._index([places[number] for number in owned])
            for row, tensors in zip(table, quantities, strict=True):
                norms = torch._foreach_norm([tensors[number] for number in owned])
                row.index_add_(0, index, torch.stack(norms).double().square())
        self._comm.all_reduce(table, name="tensor norms")
        found = table[:, self._index(places)]
        return [list(row.unbind()) for row in found]

    def _index(self, places: Sequence[int]) -> Tensor:
        """On the device; copied there once."""
        key = tuple(places)
        if key not in self._indices:
            self._indices[key] = torch.tensor(key, dtype=torch.int64, device=self._comm.device)
        return self._indices[key]
