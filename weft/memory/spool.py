"""What is saved for backward, on disk until then: in mapped files without names.

One thread writes and reads in the order in which that is asked for, by way of one page-locked room
where the device is not the processor. Files are as large as all that waits at a time needs, and
are used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import finalize

import torch
from torch import Tensor

from weft.cluster.cluster import HOST
from weft.memory.kept import expect, forget, zeros
from weft.memory.parcels import Parcel, Store, Wait
from weft.memory.tiers import ALIGNMENT
from weft.precision.roles import Role

Way = tuple[Tensor, Tensor]
"""From where to where, as bytes."""


class ToDisk:
    """Ways of parcels between a device and files.

    Args:
        folder: Where files are; None: where the system has its temporary ones.
    """

    def __init__(self, device: torch.device, folder: str | None) -> None:
        self.device = device
        self.leaving: Parcel | None = None
        self._role = Role("uint8", tier="disk", folder=folder)
        self._free: dict[int, list[Tensor]] = {}
        """Mapped memory that nothing is in, by its bytes."""
        self._turns = ThreadPoolExecutor(1, "activations")
        self._room = _Room(device)

    def send(self, stores: Sequence[Store]) -> Wait:
        """
        Raises:
            RunError: there is no room on disk.
        """
        here = [store.here for store in stores if store.here is not None]
        assert len(here) == len(stores), "nothing has left yet"
        places = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in here]
        spare = self._free.get(sum(places))
        file = spare.pop() if spare else zeros((sum(places),), self._role, self.device)
        both, start = list[Way](), 0
        for store, tensor, place in zip(stores, here, places, strict=True):
            store.there = file[start : start + tensor.nbytes]
            both.append((tensor, store.there))
            start += place
        written = self._turns.submit(self._room.write, both, self._room.now())
        here.clear()
        sent = _Sent(written, both)
        given_back = finalize(sent, self._free.setdefault(sum(places), []).append, file)
        given_back.atexit = False
        return sent

    def fetch(self, stores: Sequence[Store]) -> Wait:
        both = list[Way]()
        for store in stores:
            assert store.there is not None, "what is not here has left"
            expect(store.there)
            store.here = torch.empty_like(store.there, device=self.device)
            both.append((store.there, store.here))
        coming = self._turns.submit(self._room.read, both, self._room.now())

        def wait() -> None:
            came = coming.result()
            if came is not None:
                torch.accelerator.current_stream(self.device).wait_event(came)

        return wait


class _Sent:
    """Waits until all is written; its file is for others when nobody keeps this any more."""

    def __init__(self, written: Future[None], both: list[Way]) -> None:
        self._written, self._both = written, both

    def __call__(self) -> None:
        self._written.result()
        self._both.clear()


class _Room:
    """Page-locked memory on the way of one tensor at a time, as large as the largest so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._side = torch.Stream(device=device) if device.type != HOST else None

    def now(self) -> torch.Event | None:
        """When what was asked of what computes is done; None: it is."""
        if self._side is None:
            return None
        return torch.accelerator.current_stream(self._device).record_event()

    def write(self, both: Sequence[Way], ready: torch.Event | None) -> None:
        """Copy to files what is there when that is ready."""
        for here, there in both:
            there.copy_(self._on_host(here, ready))
            forget(there)

    def read(self, both: Sequence[Way], free: torch.Event | None) -> torch.Event | None:
        """Copy from files to memory that nobody uses any more by then.

        Returns: When the last has come, if that is not now.
        """
        came = None
        for there, here in both:
            if self._side is None or free is None:
                here.copy_(there)
            else:
                if came is not None:
                    came.synchronize()
                room = self._of(there.nbytes)
                room.copy_(there)
                self._side.wait_event(free)
                with self._side:
                    here.copy_(room, non_blocking=True)
                came = self._side.record_event()
            forget(there)
        if came is not None:
            came.synchronize()  # the room is for what comes next
        return came

    def _on_host(self, here: Tensor, ready: torch.Event | None) -> Tensor:
        if self._side is None or ready is None:
            return here
        room = self._of(here.nbytes)
        self._side.wait_event(ready)
        with self._side:
            room.copy_(here, non_blocking=True)
        self._side.synchronize()
        return room

    def _of(self, num_bytes: int) -> Tensor:
        if self._host.nbytes < num_bytes:
            self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return self._host[:num_bytes]
