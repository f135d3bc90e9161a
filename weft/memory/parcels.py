"""What is saved for backward, in the memory of the host until then.

All that one forward of a block saves is a parcel: each storage once, however many tensors are
views of it. It leaves while the next block computes, and comes back while the one after it does in
backward. Two parcels at most are on the device at a time, that of the block that computes and its
neighbour's. Nothing is rounded, and what comes back has the same strides: no number changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor


@dataclass(slots=True, eq=False, weakref_slot=True)
class Store:
    """Bytes of a storage, as long as something will read them."""

    here: Tensor | None
    there: Tensor | None = None
    """Page-locked, so that nobody waits for copies; PyTorch uses such memory again."""


class Saved(NamedTuple):
    """A tensor of a parcel."""

    parcel: Parcel
    store: Store
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Ways:
    """Streams of a device on which parcels leave and come back, beside what computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out, self.back = torch.Stream(device=device), torch.Stream(device=device)
        self.leaving: Parcel | None = None
        """The last one: its memory is free when it has left, which the next one waits for."""

    def wait(self, event: torch.Event) -> None:
        """Let what computes wait."""
        torch.accelerator.current_stream(self.device).wait_event(event)

    def now(self) -> torch.Event:
        """When what was asked of what computes is done."""
        return torch.accelerator.current_stream(self.device).record_event()


class Parcel:
    """What one forward saved.

    Args:
        stays: What is on the device in any case, such as parameters.
        before: Of the block before: who reads this one will read that next.
    """

    def __init__(self, ways: Ways, stays: Iterable[Tensor], before: Parcel | None) -> None:
        self._ways, self._before = ways, before
        self._stays = {tensor.untyped_storage().data_ptr() for tensor in stays}
        self._stores: WeakValueDictionary[int, Store] = WeakValueDictionary()
        """By their first places on the device."""
        self._leaving: list[Tensor] = []
        self._left: torch.Event | None = None
        self._came: torch.Event | None = None

    @property
    def stores(self) -> Iterator[Store]:
        """Those that will be read."""
        return self._stores.values()

    def pack(self, tensor: Tensor) -> Tensor | Saved:
        """Of a tensor that is saved."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        is_plain = type(tensor) is Tensor and not (tensor.is_conj() or tensor.is_neg())
        is_here = tensor.device == self._ways.device and storage.nbytes()
        if not (is_plain and is_here) or place in self._stays:
            return tensor
        store = self._stores.get(place)
        if store is None:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            store = self._stores[place] = Store(flat.set_(storage))
        offset = int(tensor.storage_offset())
        return Saved(self, store, offset, tensor.size(), tensor.stride(), tensor.dtype)

    @staticmethod
    def unpack(saved: Tensor | Saved) -> Tensor:
        """What was saved."""
        if isinstance(saved, Tensor):
            return saved
        saved.parcel.arrive()
        assert saved.store.here is not None, "it has arrived"
        storage = saved.store.here.untyped_storage()
        like = torch.empty(0, dtype=saved.dtype, device=storage.device)
        return like.set_(storage, saved.offset, saved.size, saved.stride)

    def leave(self) -> None:
        """Begin to leave: the forward is done. What left before has no memory here from now on."""
        ways = self._ways
        ways.out.wait_event(ways.now())
        with ways.out:
            for store in self.stores:
                assert store.here is not None, "nothing has left yet"
                there = torch.empty(store.here.nbytes, dtype=torch.uint8, pin_memory=True)
                store.there = there.copy_(store.here, non_blocking=True)
                self._leaving.append(store.here)
        self._left = ways.out.record_event()
        if ways.leaving is not None:
            ways.leaving.be_gone()
        ways.leaving = self

    def be_gone(self) -> None:
        """Let go of the memory here."""
        self._has_left()
        for store in self.stores:
            store.here = None

    def arrive(self) -> None:
        """Be here, with the parcel before on its way."""
        leaving, self._ways.leaving = self._ways.leaving, None
        if leaving is self:  # it is still here
            self._has_left()
        elif leaving is not None:  # of a later micro-batch
            leaving.be_gone()
        self.come()
        if self._came is not None:
            self._ways.wait(self._came)
            self._came = None
        if self._before is not None:
            self._before.come()
            self._before = None

    def come(self) -> None:
        """Begin to come back, unless it is here."""
        ways, both = self._ways, list[tuple[Tensor, Tensor]]()
        for store in self.stores:
            if store.here is None and store.there is not None:
                store.here = torch.empty_like(store.there, device=ways.device)
                both.append((store.here, store.there))
        if both:
            ways.back.wait_event(ways.now())  # memory that was in use until then
            with ways.back:
                for here, there in both:
                    here.copy_(there, non_blocking=True)
            self._came = ways.back.record_event()

    def _has_left(self) -> None:
        assert self._left is not None, "it has not begun to"
        self._ways.wait(self._left)
        self._leaving = []
