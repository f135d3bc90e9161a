"""Tensor parallelism in pieces: one is gathered or scattered while products of another are made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from weft.parallel import trips
from weft.parallel.division import Division
from weft.parallel.runtime import AxisGroup, Change, Lying
from weft.parallel.tp.modules import RowLinear
from weft.plan.layout import Shard
from weft.plan.tiling import split_evenly


class InPieces:
    """A divided dimension in pieces: each holds a piece of every rank's part. A piece of a part may
    be empty, and pieces of parts unequal."""

    def __init__(self, group: AxisGroup, lying: Lying) -> None:
        assert isinstance(lying.placement, Shard), f"not divided: {lying}"
        self._whole = Division(group, lying)
        self._dim = lying.placement.dim
        self._sizes = [split_evenly(part, group.pieces) for part in lying.parts]
        """Of each rank's part."""
        self._own = self._sizes[group.position]
        self._pieces = [
            Division(group, _consecutive(lying.placement, sizes))
            for sizes in zip(*self._sizes, strict=True)
        ]
        self._coming = [(piece.gathering, piece.scattering) for piece in self._pieces]
        self._going = [(back, there) for there, back in self._coming]

    def completed(self, term: Change, x: Tensor, /) -> Tensor:
        """``[.., whole, ..]`` to this rank's part of the sum of terms."""
        return self._through(self._cut(x), term, comes=False)

    def through(self, term: Change, x: Tensor) -> Tensor:
        """This rank's part to its part of the sum of terms of the whole."""
        return self._through(torch.split(x, self._own, self._dim), term, comes=True)

    def products(self, of: Sequence[Change], x: Tensor) -> list[Tensor]:
        """This rank's part to products of the whole."""
        parts, coming = torch.split(x, self._own, self._dim), self._coming
        if torch.compiler.is_compiling():
            from weft.parallel.tp import uncompiled

            made = uncompiled.products(parts, coming, of, uncompiled.WAYS)
        else:
            made = trips.products(parts, coming, of, trips.PLAIN)
        return [self._joined(pieces) for pieces in made]

    def made_by(self, module: nn.Module, last: str, /) -> nn.Module:
        """It computes a piece after the other."""
        return Through(module, last, self)

    def read_by(self, module: nn.Module, names: Sequence[str], /) -> None:
        """Their products are made before it computes, piece by piece."""
        readers = [Reader(module.get_submodule(name), n) for n, name in enumerate(names)]
        for name, reader in zip(names, readers, strict=True):
            module.set_submodule(name, reader)

        def hook(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (self.products([reader.product for reader in readers], args[0]), *args[1:])

        module.register_forward_pre_hook(hook)

    def _through(self, parts: Sequence[Tensor], term: Change, *, comes: bool) -> Tensor:
        coming, going = self._coming if comes else (), self._going
        if torch.compiler.is_compiling():
            from weft.parallel.tp import uncompiled

            made = uncompiled.through(parts, coming, term, going, uncompiled.WAYS)
        else:
            made = trips.through(parts, coming, term, going, trips.PLAIN)
        return torch.cat(made, dim=self._dim)

    def _cut(self, x: Tensor) -> list[Tensor]:
        """The pieces of the whole."""
        every = [size for sizes in self._sizes for size in sizes]
        blocks = torch.split(self._whole.by_rank(x), every, self._dim)
        many = len(self._pieces)
        return [torch.cat(blocks[n::many], self._dim) for n in range(many)]

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole of its pieces."""
        sizes = list(map(list, zip(*self._sizes, strict=True)))
        blocks = [torch.split(x, own, self._dim) for x, own in zip(pieces, sizes, strict=True)]
        by_rank = [block for rank in zip(*blocks, strict=True) for block in rank]
        whole = torch.cat(by_rank, self._dim)
        return self._whole.in_order(whole)


class Reader(nn.Module):
    """A product that the module around it has had made before it computes."""

    def __init__(self, product: nn.Module, number: int) -> None:
        super().__init__()
        self.product = product
        self._number = number

    def forward(self, made: Sequence[Tensor]) -> Tensor:
        """Of all products its own."""
        return made[self._number]


class Through(nn.Module):
    """A module that ends in a sum, and treats elements one by one until then: piece by piece."""

    def __init__(self, module: nn.Module, last: str, pieces: InPieces) -> None:
        super().__init__()
        row = module.get_submodule(last)
        assert isinstance(row, RowLinear), f"{last} is no product in parts: {row}"
        module.set_submodule(last, row.product)
        self.inner = module
        self.bias = row.bias
        self._pieces = pieces

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, own seq, d_model]`` to the same."""
        y = self._pieces.through(self.inner, x)
        return y if self.bias is None else y + self.bias


def _consecutive(placement: Shard, sizes: Sequence[int]) -> Lying:
    """Parts of such sizes, one after the other."""
    ends = list(accumulate(sizes, initial=0))
    held = tuple((range(low, low + n),) for low, n in zip(ends, sizes, strict=False))
    return Lying(placement, held)
