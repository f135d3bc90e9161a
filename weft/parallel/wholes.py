"""Whole logical tensors for optimizers, however they are split: sums along dimensions of them, and
functions of a whole one. Exact, for every element counts once, where it is owned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from math import prod

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.parallel.mains import MainParam
from weft.parallel.params import Held
from weft.plan.box import Box
from weft.plan.model import ParamSpec

MOST_AT_ONCE = 8
"""Whole tensors that a rank keeps at a time, in ``by_whole``."""
Wanted = Callable[[ParamSpec], bool]
Dims = tuple[int, ...]
Kept = Callable[[ParamSpec], Sequence[Dims]]
"""Of a parameter: for each sum that is asked for, the dimensions that it still has."""


class WholeTensors:
    """Every parameter of the job that is trained, in the one order that all ranks agree on.

    Args:
        pieces: The common refinement of every parameter's tiling, of the whole job.
        computed: Dtype in which this rank's model computes with each parameter that it holds.
        updated: Dtype of what is updated.
    """

    def __init__(
        self,
        pieces: Mapping[str, Sequence[Held]],
        comm: Comm,
        *,
        computed: Mapping[str, torch.dtype],
        updated: torch.dtype,
    ) -> None:
        self._comm = comm
        self._computed, self._updated = computed, updated
        self._pieces = {n: held for n, held in pieces.items() if held and held[0].spec.trainable}
        self._names: Collection[str] = self._pieces

    @property
    def specs(self) -> list[ParamSpec]:
        """Of all these parameters."""
        return [held[0].spec for held in self._pieces.values()]

    def of(self, names: Collection[str]) -> WholeTensors:
        """The same, where ``by_whole`` is asked about these alone, of the names of all. Sums still
        have their places among those of all, so that not one bit of them differs."""
        few = copy(self)
        few._names = names
        return few

    def squares_along(
        self, mains: Sequence[MainParam], tensors: Sequence[Tensor], kept: Kept
    ) -> list[list[Tensor]]:
        """For each main, and each of ``kept``: sums of squares over its whole logical tensor along
        the other dimensions, fp64; of those that are kept, the part in the main's box.

        ``tensors`` has one for each main, of its shape. Collective over all ranks of the job.
        """
        places, size = self._places(kept)
        table = torch.zeros(size, dtype=torch.float64, device=self._comm.device)

        def parts(main: MainParam) -> list[tuple[Tensor, Dims]]:
            """What of the table belongs to a main, with the dimensions that it has."""
            slices = main.box.slices()
            return [
                (table[place].view(shape)[tuple(slices[d] for d in dims)], dims)
                for place, shape, dims in places[main.spec.name]
            ]

        for main, tensor in zip(mains, tensors, strict=True):
            for part, dims in parts(main) if main.owned else ():
                others = [d for d in range(tensor.ndim) if d not in dims]
                norms = torch.linalg.vector_norm(tensor, dim=others, dtype=torch.float64)
                part.add_(norms.square())
        self._comm.all_reduce(table, name="tensor sums")
        return [[part for part, _ in parts(main)] for main in mains]

    def _places(self, kept: Kept) -> tuple[dict[str, list[tuple[slice, Dims, Dims]]], int]:
        """Of each parameter's sums the place in one table, their shape and the dimensions that they
        have; and the table's size."""
        places: dict[str, list[tuple[slice, Dims, Dims]]] = {}
        end = 0
        for name, (first, *_) in self._pieces.items():
            places[name] = []
            for dims in kept(first.spec):
                shape = tuple(first.spec.shape[d] for d in dims)
                begin, end = end, end + prod(shape)
                places[name].append((slice(begin, end), shape, dims))
        return places, end

    def open(self, wanted: Wanted) -> None:
        """Before ``by_whole`` of such parameters: the groups that it talks in. Collective."""
        groups = (_holders(held) for held in self._pieces.values() if wanted(held[0].spec))
        self._comm.open_groups(dict.fromkeys(groups))

    def by_whole(
        self,
        mains: Sequence[MainParam],
        tensors: Sequence[Tensor],
        wanted: Wanted,
        change: Callable[[Tensor, torch.dtype], Tensor],
    ) -> dict[MainParam, Tensor]:
        """What a function makes of whole logical tensors: of each main the part in its box.

        Holders of several tensors compute one each, at the same time, and give one another what
        came of it: so it is the same on all, whatever they compute on.

        Args:
            mains: Of the parameters that are ``wanted``, all that this rank has.
            tensors: One for each main, of its shape.
            change: From a whole tensor and the dtype that the model computes in.

        Collective over the holders of each parameter, whether they have a main of it or not.
        """
        given: dict[str, list[tuple[MainParam, Tensor]]] = {}
        for main, tensor in zip(mains, tensors, strict=True):
            given.setdefault(main.spec.name, []).append((main, tensor))
        found: dict[MainParam, Tensor] = {}
        for ranks, names in self._turns(wanted):
            if self._comm.rank not in ranks:
                continue
            wholes = [self._gathered(name, ranks, given.get(name, [])) for name in names]
            mine = ranks.index(self._comm.rank)
            for turn, (name, whole) in enumerate(zip(names, wholes, strict=True)):
                is_mine = turn == mine
                wholes[turn] = (
                    change(whole, self._computed[name]) if is_mine else torch.zeros_like(whole)
                )
            for name, result in zip(names, wholes, strict=True):
                self._comm.all_reduce(result, name="whole tensors", group=ranks)
                found.update((main, result[main.box.slices()]) for main, _ in given.get(name, []))
        return found

    def _turns(self, wanted: Wanted) -> Iterator[tuple[tuple[int, ...], list[str]]]:
        """Parameters that follow each other and have the same holders, at most one for each."""
        ranks: tuple[int, ...] = ()
        names: list[str] = []
        for name, held in self._pieces.items():
            if name not in self._names or not wanted(held[0].spec):
                continue
            if names and (ranks != _holders(held) or len(names) == min(len(ranks), MOST_AT_ONCE)):
                yield ranks, names
                names = []
            ranks, names = _holders(held), [*names, name]
        if names:
            yield ranks, names

    def _gathered(
        self, name: str, ranks: tuple[int, ...], mine: Sequence[tuple[MainParam, Tensor]]
    ) -> Tensor:
        held = self._pieces[name]
        shape = held[0].spec.shape
        if all(piece.level == 0 and piece.box == Box.whole(shape) for piece in held):
            ((_, tensor),) = mine
            return tensor
        whole = torch.zeros(shape, dtype=self._updated, device=self._comm.device)
        for main, tensor in mine:
            if main.owned:
                whole[main.box.slices()] = tensor
        self._comm.all_reduce(whole, name="whole tensors", group=ranks)
        return whole


def _holders(held: Sequence[Held]) -> tuple[int, ...]:
    """Every rank that has a part of a parameter, ascending."""
    return tuple(sorted({rank for piece in held for rank in piece.ranks}))
