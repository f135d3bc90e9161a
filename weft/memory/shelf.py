"""Where parameters wait until something computes with them, and how they come: one layer ahead.

From the memory of the host they come on a stream of their own, from a file by a thread that reads
ahead of who computes. What is read goes through two page-locked rooms where the device is not the
processor, and straight to its place where it is: nothing grows with the model.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

from weft.cluster.cluster import HOST
from weft.memory.kept import expect, forget, zeros
from weft.memory.tiers import keeps_apart
from weft.platform.registry import platform_named
from weft.precision.roles import Role

Finish = Callable[[], None]
"""Waits for what was begun."""


class Shelf(Protocol):
    """One tier, as a rank uses it."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A place for so many elements.

        Raises:
            RunError: there is no room.
        """

    def bring(self, rest: Tensor, into: Tensor, then: Callable[[], Finish]) -> Finish:
        """Begin to copy what rests there to the device, and go on with ``then`` when it is here.

        Returns: To be called before what computes reads what ``then`` made.
        """


def shelf_for(role: Role, device: torch.device) -> Shelf | None:
    """Of what has this role; None where it is in the device's own memory."""
    if not keeps_apart(role.tier, device.type):
        return None
    return _OnDisk(role, device) if role.tier == "disk" else _OnHost(device)


class _OnHost:
    """Page-locked memory, so that nobody waits for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._way = device, torch.Stream(device=device)
        self._platform = platform_named(device.type)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._platform.page_locked(numel * dtype.itemsize).view(dtype)

    def bring(self, rest: Tensor, into: Tensor, then: Callable[[], Finish]) -> Finish:
        computes, way = torch.accelerator.current_stream(self._device), self._way
        way.wait_event(computes.record_event())  # memory that was in use until then
        with way:
            into.copy_(rest, non_blocking=True)
            finish = then()
        came = way.record_event()

        def arrive() -> None:
            torch.accelerator.current_stream(self._device).wait_event(came)
            finish()

        return arrive


class _OnDisk:
    """Mapped files without names. ``then`` begins when its turn to be waited for comes, on the
    thread that asked: so all ranks begin what they do together in one order."""

    def __init__(self, role: Role, device: torch.device) -> None:
        self._role, self._device = role, device
        self._reads = ThreadPoolExecutor(1, "parameters ahead")
        self._rooms = cycle([_Room(device), _Room(device)])

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        role = Role(str(dtype).removeprefix("torch."), tier="disk", folder=self._role.folder)
        return zeros((numel,), role, self._device)

    def bring(self, rest: Tensor, into: Tensor, then: Callable[[], Finish]) -> Finish:
        expect(rest)
        room, free = next(self._rooms), None
        if self._device.type != HOST:
            free = torch.accelerator.current_stream(self._device).record_event()
        coming = self._reads.submit(room.read, rest, into, free)

        def arrive() -> None:
            came = coming.result()
            if came is not None:
                torch.accelerator.current_stream(self._device).wait_event(came)
            then()()

        return arrive


class _Room:
    """Page-locked memory for what is read, as large as the largest so far."""

    def __init__(self, device: torch.device) -> None:
        self._host = torch.empty(0, dtype=torch.uint8)
        self._way = torch.Stream(device=device) if device.type != HOST else None
        self._left: torch.Event | None = None

    def read(self, rest: Tensor, into: Tensor, free: torch.Event | None) -> torch.Event | None:
        """Copy what rests; ``free``: when nobody uses the memory any more that it comes to.

        Returns: When it is there, if that is not now.
        """
        if self._way is None or free is None:
            into.copy_(rest)
            forget(rest)
            return None
        if self._left is not None:
            self._left.synchronize()
        if self._host.nbytes < rest.nbytes:
            self._host = torch.empty(rest.nbytes, dtype=torch.uint8, pin_memory=True)
        page_locked = self._host[: rest.nbytes].view(rest.dtype)
        page_locked.copy_(rest)
        forget(rest)
        self._way.wait_event(free)
        with self._way:
            into.copy_(page_locked, non_blocking=True)
        self._left = self._way.record_event()
        return self._left
