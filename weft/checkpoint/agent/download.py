"""Copies from a device that neither the host nor what the device computes waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

PIECE_BYTES = 1 << 26
MOST_BYTES = 1 << 33
"""Of page-locked memory. Where more is copied whoever begins it waits until the rest has a room."""

Write = Callable[[memoryview, int], None]
"""Takes bytes, and the place in which they belong."""


class Download(NamedTuple):
    """One that has begun."""

    has_read: torch.Event
    """The device has, all of it: it may be changed then."""
    arrives: Future[None]
    """All is written."""


class _Piece(NamedTuple):
    room: Tensor
    spans: Sequence[tuple[int, int, int]]
    """Where bytes begin in it, their place, and how many they are."""
    is_there: torch.Event
    sources: Sequence[Tensor]
    """Kept until they are read."""

    def write_out(self, write: Write) -> None:
        data = self.room.numpy().data
        for low, place, count in self.spans:
            write(data[low : low + count], place)


def _nowhere(_: memoryview, __: int) -> None:
    """Something failed before."""


class Downloads:
    """Copies of tensors of one device, on a stream of its own, one after another.

    They come by way of page-locked memory, which is made once and used again: from a device to
    other memory a copy goes only while the host waits.
    """

    def __init__(self, device: torch.device, *, most_bytes: int = MOST_BYTES) -> None:
        self._device = device
        self._side = torch.Stream(device=device)
        self._thread = ThreadPoolExecutor(1, "downloads")
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._most_bytes = most_bytes
        self._room_bytes = 0
        self.made = 0
        """Pieces of page-locked memory."""

    def bytes_for(self, num_bytes: int) -> int:
        """How much page-locked memory tensors of so many bytes together will have."""
        return min(num_bytes, self._most_bytes)

    def begin(
        self, tensors: Sequence[tuple[Tensor, int]], write: Write, then: Callable[[], None]
    ) -> Download:
        """Copy tensors as they are when the current stream comes to here.

        Args:
            tensors: Each with its place, in bytes.
            write: Called in a thread, with what has arrived.
            then: And this, when all is written; not where something failed.
        """
        if not self._room_bytes:
            total = sum(tensor.nbytes for tensor, _ in tensors)
            self._room_bytes = max(1, min(PIECE_BYTES, total, self._most_bytes // 2))
        filled: SimpleQueue[_Piece | bool] = SimpleQueue()
        arrives = self._thread.submit(self._bring, filled, write, then)
        is_asked = False
        try:
            self._side.wait_stream(torch.accelerator.current_stream(self._device))
            with self._side:
                for piece in self._packed(tensors):
                    filled.put(piece)
            is_asked = True
        finally:
            filled.put(is_asked)
        return Download(self._side.record_event(), arrives)

    def close(self) -> None:
        """What has begun still ends."""
        self._thread.shutdown(wait=False)

    def _packed(self, tensors: Sequence[tuple[Tensor, int]]) -> Iterator[_Piece]:
        """Ask for all copies on the current stream, room by room."""
        room, used = self._room(), 0
        spans: list[tuple[int, int, int]] = []
        sources: list[Tensor] = []
        for tensor, place in tensors:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            start = 0
            while start < flat.numel():
                if used == room.numel():
                    yield _Piece(room, spans, self._side.record_event(), sources)
                    room, used, spans, sources = self._room(), 0, [], []
                count = min(room.numel() - used, flat.numel() - start)
                room[used : used + count].copy_(flat[start : start + count], non_blocking=True)
                _add(spans, (used, place + start, count))
                sources.append(flat)
                used, start = used + count, start + count
        yield _Piece(room, spans, self._side.record_event(), sources)

    def _room(self) -> Tensor:
        """One that is free: made where few are, else waited for.

        Raises OSError where the host has no such memory at all.
        """
        if self._free.empty() and (self.made + 1) * self._room_bytes <= self._most_bytes:
            try:
                room = torch.empty(self._room_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                if not self.made:
                    raise OSError(f"no page-locked memory: {error}") from error
                self._most_bytes = self.made * self._room_bytes
            else:
                self.made += 1
                return room
        return self._free.get()

    def _bring(
        self, filled: SimpleQueue[_Piece | bool], write: Write, then: Callable[[], None]
    ) -> None:
        problem: Exception | None = None
        while isinstance(piece := filled.get(), _Piece):
            try:
                piece.is_there.synchronize()
                piece.write_out(write if problem is None else _nowhere)
            except Exception as error:  # noqa: BLE001 - raised when whoever waits for a room has one
                problem = error
            finally:
                self._free.put(piece.room)
        if problem is not None:
            raise problem
        if piece:
            then()


def _add(spans: list[tuple[int, int, int]], span: tuple[int, int, int]) -> None:
    """What goes on where the last one ends is one with it."""
    if spans:
        low, place, count = spans[-1]
        if (low + count, place + count) == span[:2]:
            spans[-1] = low, place, count + span[2]
            return
    spans.append(span)
