"""What is saved for backward, in the memory of the host or on disk until then.

All that one forward of a block saves is a parcel: each storage once, however many tensors are
views of it. It leaves while the next block computes, and comes back while the one after it does in
backward. Two parcels at most are on the device at a time, that of the block that computes and its
neighbour's. Nothing is rounded, and what comes back has the same strides: no number changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor


@dataclass(slots=True, eq=False, weakref_slot=True)
class Store:
    """Bytes of a storage, as long as something will read them."""

    here: Tensor | None
    there: Tensor | None = None


class Saved(NamedTuple):
    """A tensor of a parcel."""

    parcel: Parcel
    store: Store
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


Wait = Callable[[], None]
"""Lets what computes wait for copies."""


class Ways(Protocol):
    """By which parcels leave a device and come back, beside what computes."""

    device: torch.device
    leaving: Parcel | None
    """The last one: its memory is free when it has left, which the next one waits for."""

    def send(self, stores: Sequence[Store]) -> Wait:
        """Begin to copy what is here, to ``there``; after the wait nobody reads it any more. Who
        asks keeps that as long as it reads what is there."""

    def fetch(self, stores: Sequence[Store]) -> Wait:
        """Begin to copy what is there, to ``here``."""


class ToHost:
    """Streams of a device, to page-locked memory, so that nobody waits for copies; PyTorch uses
    such memory again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.leaving: Parcel | None = None
        self._out, self._back = torch.Stream(device=device), torch.Stream(device=device)

    def send(self, stores: Sequence[Store]) -> Wait:
        leaving = list[Tensor]()
        self._out.wait_event(self._now())
        with self._out:
            for store in stores:
                assert store.here is not None, "nothing has left yet"
                there = torch.empty(store.here.nbytes, dtype=torch.uint8, pin_memory=True)
                store.there = there.copy_(store.here, non_blocking=True)
                leaving.append(store.here)
        left = self._out.record_event()

        def wait() -> None:
            self._wait(left)
            leaving.clear()

        return wait

    def fetch(self, stores: Sequence[Store]) -> Wait:
        both = list[tuple[Tensor, Tensor]]()
        for store in stores:
            assert store.there is not None, "what is not here has left"
            store.here = torch.empty_like(store.there, device=self.device)
            both.append((store.here, store.there))
        self._back.wait_event(self._now())  # memory that was in use until then
        with self._back:
            for here, there in both:
                here.copy_(there, non_blocking=True)
        return partial(self._wait, self._back.record_event())

    def _wait(self, event: torch.Event) -> None:
        torch.accelerator.current_stream(self.device).wait_event(event)

    def _now(self) -> torch.Event:
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
        self._left: Wait | None = None
        self._came: Wait | None = None

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
        self._left = ways.send(list(self.stores))
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
            self._came()
            self._came = None
        if self._before is not None:
            self._before.come()
            self._before = None

    def come(self) -> None:
        """Begin to come back, unless it is here."""
        gone = [store for store in self.stores if store.here is None and store.there is not None]
        if gone:
            self._came = self._ways.fetch(gone)

    def _has_left(self) -> None:
        assert self._left is not None, "it has not begun to"
        self._left()
