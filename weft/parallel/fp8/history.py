"""The largest magnitudes of earlier steps, by which what linear layers multiply is scaled.

Every rank has those of all layers. They are of whole steps of the whole job: whatever divides
samples, tokens or weights, the largest is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.parallel.fp8.rounding import (
    Combine,
    Scaled,
    Spans,
    largest_of,
    rounded,
    scale_for,
    scale_of,
)
from weft.plan.model import ParamSpec
from weft.plan.plan import Plan
from weft.precision.registry import scales_delayed

STREAM, WEIGHT, GRADIENT = range(3)
"""What one layer multiplies."""
DTYPES = torch.float8_e4m3fn, torch.float8_e5m2
"""What has scales."""
_UNSEEN = -1.0
"""In place of steps that never were; 0: nothing but zeros, or numbers that are none."""

M = TypeVar("M")


class Histories:
    """Of the layers of a job, by the names of their weights.

    Args:
        length: Steps that count.
        comm: Of all ranks that train together.
        margin: Powers of two that scales leave for numbers to grow.
    """

    def __init__(self, names: Sequence[str], length: int, comm: Comm, *, margin: int = 0) -> None:
        size = len(names), 3
        self._places = {name: number for number, name in enumerate(names)}
        self._seen = torch.zeros(size, dtype=torch.float32, device=comm.device)
        self._table = self._seen.new_full((*size, length), _UNSEEN)
        """Newest last. Another after each step: copies of an earlier one may be under way."""
        self._comm, self.margin = comm, margin
        self.expected = self._seen.clone()
        """By layer and what it multiplies: the largest of the steps that count, 0 for none."""
        self._scales = {dtype: self._seen.clone() for dtype in DTYPES}
        """For those. Layers have views of them, which are written between steps."""
        self._lacking = torch.tensor(length)
        """Steps until there are as many as count, in the host's memory."""
        self._expect()

    def of(self, name: str) -> History | None:
        """Of one layer, if it has one."""
        if name not in self._places:
            return None
        layer = self._places[name]
        scales = {dtype: table[layer] for dtype, table in self._scales.items()}
        return History(self._seen[layer], self.expected[layer], scales, self._lacking)

    def observing(self, passes: Callable[[M], Tensor]) -> Callable[[M], Tensor]:
        """The same passes, as one step; what was seen elsewhere, as in evaluations, is none."""
        if not self._places:
            return passes

        def observed(batch: M) -> Tensor:
            self._seen.zero_()
            sums = passes(batch)
            self._take()
            return sums

        return observed

    def _take(self) -> None:
        self._seen.nan_to_num_(nan=math.inf, posinf=math.inf)  # which all backends compare alike
        self._comm.all_reduce(self._seen, name="fp8 scales", largest=True)
        newest = self._seen.masked_fill(~self._seen.isfinite(), 0.0)
        self._table = torch.cat((self._table[..., 1:], newest[..., None]), dim=-1)
        self._expect()
        self._lacking.sub_(1).clamp_(min=0)

    def _expect(self) -> None:
        self.expected.copy_(self._table.amax(-1).clamp(min=0))
        for dtype, scales in self._scales.items():
            scales.copy_(scale_for(self.expected * 2.0**self.margin, dtype))

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint holds, ``[3, length]`` by name; on one rank of those that train
        together."""
        if self._comm.rank == self._comm.world[0]:
            yield from self.named().items()

    def named(self) -> dict[str, Tensor]:
        """By name what counts, ``[3, length]``; of no names where nothing is delayed."""
        return dict(zip(self._places, self._table, strict=True))

    def restore(self, read: Callable[[Tensor, str], bool]) -> None:
        """``read`` writes what a checkpoint holds of a name, or says that it holds nothing; such a
        layer begins anew."""
        if not self._places:
            return
        for name, layer in self._places.items():
            found = torch.empty(self._table.shape[1:], dtype=torch.float32)
            self._table[layer] = found.to(self._table) if read(found, name) else _UNSEEN
        self._expect()
        self._lacking.fill_(int((self._table[:, 0] < 0).sum(-1).max()))


@dataclass(frozen=True, slots=True)
class History:
    """Of one layer; each ``[3]``, of what it multiplies."""

    seen: Tensor
    """The largest magnitudes of this step."""
    expected: Tensor
    """Those of the steps that count, 0 for none."""
    scales: Mapping[torch.dtype, Tensor]
    """For those."""
    lacking: Tensor
    """``[]``, in the host's memory: steps until there are as many as count."""

    def scaled(
        self,
        kind: int,
        x: Tensor,
        dtype: torch.dtype,
        spans: Spans,
        *,
        combine: Combine | None,
        fused: bool,
    ) -> Scaled:
        """Round by the largest of earlier steps, times two to the power of the margin. What was
        never anything but zero has the scale of the numbers themselves: of all ranks that have some
        of them as long as there are fewer steps than count."""
        largest = largest_of(x, spans, fused=fused)
        if torch.compiler.is_compiling():
            from weft.parallel.fp8.uncompiled import noted

            largest = noted(largest, self.seen[kind])
        else:
            note(largest, self.seen[kind])
            if combine is not None and self.lacking:
                largest = combine(largest)
        current = scale_of(largest, dtype, fused=fused)
        scale = torch.where(self.expected[kind] > 0, self.scales[dtype][kind], current)
        return rounded(x, scale, dtype, spans, fused=fused)


def note(largest: Tensor, seen: Tensor) -> None:
    """Take note of the largest magnitudes of something that is multiplied in this step."""
    if largest.numel():
        torch.maximum(seen, largest.amax().to(seen), out=seen)


def is_delayed(plan: Plan) -> bool:
    """Some stage has such scales."""
    return any(scales_delayed(stage.precision) for _, _, stage in plan.stages())


def histories_of(plan: Plan, specs: Sequence[ParamSpec], comm: Comm) -> Histories:
    """What the ranks of a plan train with; of no layer where no stage asks for any."""
    delayed = {
        layer
        for _, _, stage in plan.stages()
        if scales_delayed(stage.precision)
        for layer in stage.blocks
    }
    linears = [
        spec.name for spec in specs if spec.unit in delayed and len(spec.shape) == 2 and spec.fp8
    ]
    return Histories(linears, plan.history if delayed else 1, comm, margin=plan.margin)
