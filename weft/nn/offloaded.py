"""Blocks that keep what backward reads in the memory of the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from weft.memory.parcels import Parcel, Ways
from weft.nn.stage import Call, Unit, tensors_in


def offload(units: Iterable[Unit], ways: Ways) -> None:
    """Let blocks that follow one another do so. Outside of what is compiled."""
    before: Offloaded | None = None
    for unit in units:
        assert unit.block is not None, "only blocks are alike, so that one hides another"
        before = Offloaded(unit.block, ways, before)
        unit.wrap(before.around)


class Offloaded:
    """A block: what each forward saves is a parcel.

    Args:
        before: The block before, where that is one too.
    """

    def __init__(self, block: nn.Module, ways: Ways, before: Offloaded | None) -> None:
        self._block, self._ways, self._before = block, ways, before
        self._last: ReferenceType[Parcel] | None = None

    @property
    def last(self) -> Parcel | None:
        """Of the last forward, as long as backward will read it."""
        return None if self._last is None else self._last()

    def around(self, call: Call) -> Call:
        """The block's forward that does so."""
        return partial(self._forward, call)

    def _forward(self, call: Call, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args)
        before = None if self._before is None else self._before.last
        parcel = Parcel(self._ways, self._staying(args), before)
        with saved_tensors_hooks(parcel.pack, parcel.unpack):
            result = call(*args)
        parcel.leave()
        self._last = ref(parcel)
        return result

    def _staying(self, args: Any) -> Iterator[Tensor]:
        """Parameters, what all blocks are given, and what came over a stage border, which the
        schedule keeps."""
        yield from self._block.parameters()
        yield from self._block.buffers()
        for tensor in tensors_in(args):
            whole = tensor if tensor._base is None else tensor._base
            if whole.is_leaf:
                yield tensor
