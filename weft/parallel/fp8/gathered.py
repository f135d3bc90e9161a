"""Weights that are gathered in eight bits: rounded before as products, which alone read them, would
round them after.

What has one scale is a part of the unsplit model, a weight or a block of it, so the largest of it
is found among all ranks that hold some. Products that round once more change nothing: the largest
keeps its scale, or has become half of the largest number that there is; then all is scaled by twice
as much, and no number of eight bits has a rounding less for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.comm.comm import Comm
from weft.config.errors import ConfigError
from weft.nn.stage import Stage
from weft.parallel.buckets import Bucket
from weft.parallel.fp8.linear import ScaledLinear
from weft.parallel.fp8.rounding import Scaled, Spans, largest_of, scale_for
from weft.parallel.params import Held, LocalParam
from weft.plan.box import Box
from weft.precision.casts import BLOCK

FACTORS = torch.float8_e4m3fn
"""What weights are rounded to."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Of a weight in the table of all."""

    start: int
    blocks: tuple[int, ...]
    """How many of them along each dimension."""
    block: int
    """Elements along a side of one; 0: the weight is one."""


class WeightScales:
    """Of all weights of the job that are gathered so, on every rank.

    Args:
        pieces: The common refinement of every parameter's tiling, of the whole job.
    """

    def __init__(self, pieces: Mapping[str, Sequence[Held]], comm: Comm) -> None:
        self._comm = comm
        self._places: dict[str, _Place] = {}
        size = 0
        for name, cut in pieces.items():
            if any(held.rounding and held.level for held in cut):
                shape, block = cut[0].spec.shape, BLOCK * (cut[0].rounding == "blockwise")
                blocks = tuple(-(-each // block) if block else 1 for each in shape)
                self._places[name] = _Place(size, blocks, block)
                size += prod(blocks)
        self._largest = torch.zeros(size, dtype=torch.float32, device=comm.device)

    def find(self, parts: Iterable[tuple[str, Box, Tensor]]) -> None:
        """Of what updates left: all that this rank has of any parameter. Collective over all ranks
        of the job."""
        if not self._places:
            return
        self._largest.zero_()
        for name, box, values in parts:
            place = self._places.get(name)
            if place is not None and box.numel:
                here = self._of(place, box)
                here.copy_(torch.maximum(here, _largest(values, box, place.block).to(here)))
        self._largest.nan_to_num_(nan=math.inf, posinf=math.inf)  # all backends compare it alike
        self._comm.all_reduce(self._largest, name="weight scales", largest=True)

    def of(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """For a box of a weight as ``dtype`` has it: one scale, or one for each element."""
        place = self._places[name]
        scale = scale_for(self._of(place, box).to(dtype), FACTORS)
        for dim in range(scale.dim()) if place.block else ():
            scale = scale.repeat_interleave(place.block, dim)
            scale = scale.narrow(dim, box.offset[dim] % place.block, box.size[dim])
        return scale

    def _of(self, place: _Place, box: Box) -> Tensor:
        """The blocks of which a box has some."""
        table = self._largest[place.start : place.start + prod(place.blocks)].view(place.blocks)
        if not place.block:
            return table
        both = zip(box.offset, box.end, strict=True)
        return table[tuple(slice(o // place.block, -(-e // place.block)) for o, e in both)]


def _largest(values: Tensor, box: Box, block: int) -> Tensor:
    """Of what a box has of each block."""
    if not block:
        return largest_of(values, Spans(whole=(0, 1)))
    above, left = (offset % block for offset in box.offset)
    return largest_of(F.pad(values, (left, 0, above, 0)), Spans(blocks=(0, 1)), block)


class RoundedBucket:
    """One bucket of such weights on its way, in bytes: libraries of collectives know no numbers in
    eight bits."""

    def __init__(self, bucket: Bucket, rank: int, scales: WeightScales) -> None:
        self._bucket, self._rank, self._scales = bucket, rank, scales

    def encode(self, own: Tensor) -> Tensor:
        """What this rank keeps of it, rounded."""
        message = torch.zeros(len(own), dtype=torch.uint8, device=own.device)
        rooms = self._bucket.kept_views(self._rank, message)
        views = self._bucket.kept_views(self._rank, own)
        for each, room, values in zip(self._bucket.kept(self._rank), rooms, views, strict=True):
            scale = self._scales.of(each.held.spec.name, each.box, own.dtype)
            room.copy_((values * scale.to(own)).to(FACTORS).view(torch.uint8))
        return message

    def decode(self, message: Tensor, flat: Tensor) -> None:
        """All of it, as it was rounded."""
        for each in self._bucket.entries:
            place = slice(each.start, each.stop)
            scale = self._scales.of(each.held.spec.name, each.box, flat.dtype)
            values = message[place].view(FACTORS).view(each.box.size)
            flat[place].view(each.box.size).copy_(Scaled(values, scale).exact(flat.dtype))


def refuse_other_uses(
    stages: Iterable[Stage],
    params: Sequence[LocalParam],
    pieces: Mapping[str, Sequence[Held]],
) -> None:
    """Who reads such a weight and is no product in eight bits would read it rounded.

    Raises:
        ConfigError: some module does.
    """
    names = {
        id(local.param): local.spec.name
        for local in params
        if any(held.rounding for held in pieces[local.spec.name])
    }
    for module in (each for stage in stages for each in stage.module.modules()):
        for param in () if isinstance(module, ScaledLinear) else module.parameters(recurse=False):
            if id(param) in names:
                hint = f"{type(module).__name__} reads {names[id(param)]} as it is; in a group of "
                hint += "optim.groups with fp8: false it is gathered so."
                raise ConfigError("plan.gather", "fp8", "null with this model", hint)
