"""Pieces of what is kept apart on their way to the device, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from weft.cluster.cluster import HOST
from weft.memory.kept import expect, forget
from weft.memory.tiers import ALIGNMENT, NUM_ROOMS

Piece = Sequence[Tensor]
"""Tensors in host memory or on disk."""


class Belt:
    """Brings one piece after another, the next one while a piece is used, and takes it back.

    There is memory for ``NUM_ROOMS`` of them, each as large as the largest of those that come to it
    in turn. What is page-locked itself comes from where it is and leaves to there, other tensors
    by way of as much page-locked memory.
    """

    def __init__(
        self, device: torch.device, pieces: Sequence[Piece], read_only: Sequence[int] = ()
    ) -> None:
        """``read_only``: of each piece, so many tensors at its end are not taken back; empty: all
        are."""
        num_rooms = min(NUM_ROOMS, len(pieces))
        self._rooms = [_Room(device, pieces[number::num_rooms]) for number in range(num_rooms)]
        kept = [
            len(piece) - last
            for piece, last in zip(pieces, read_only or [0] * len(pieces), strict=True)
        ]
        turns = zip(cycle(self._rooms), pieces, kept)
        self._turns = [(room, room.place(piece, changed)) for room, piece, changed in turns]
        self._reads = ThreadPoolExecutor(1, "reads ahead")
        self._writes = ThreadPoolExecutor(1, "writes behind")

    @property
    def rooms(self) -> list[Tensor]:
        """Memory of the device that it keeps."""
        return [room.here for room in self._rooms]

    def each(self) -> Iterator[list[Tensor]]:
        """Of every piece, copies of its tensors on the device. What the current stream makes of
        them until the next one is asked for is in the tensors when all are done."""
        turns = self._turns
        coming = [self._reads.submit(room.fill, placed) for room, placed in turns[:1]]
        leaving: list[Future[None]] = []
        for number, (room, placed) in enumerate(turns):
            coming[number].result()
            if number + 1 >= NUM_ROOMS:
                leaving[number + 1 - NUM_ROOMS].result()
            coming += [self._reads.submit(r.fill, p) for r, p in turns[number + 1 : number + 2]]
            room.arrived()
            yield placed.here
            leaving.append(self._writes.submit(room.take_back, placed, room.used()))
        for each in leaving:
            each.result()


class _Placed(NamedTuple):
    """A piece and its places in a room."""

    here: list[Tensor]
    locked: list[Tensor]
    """Page-locked memory of each: its own, or its place in the room's."""
    others: list[tuple[Tensor, Tensor]]
    """What is not page-locked itself, with its place of that memory; on a processor all is here."""
    num_changed: int
    """The first so many are taken back."""
    num_others_changed: int


class _Room:
    """Memory of the device for one of these pieces at a time, and of the host for what of them a
    device does not read by itself."""

    def __init__(self, device: torch.device, pieces: Sequence[Piece]) -> None:
        num_bytes = max(map(room_bytes, pieces))
        self.here = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._host, self._side = self.here, None
        if device.type != HOST:
            num_bytes = max(room_bytes([t for t in piece if not t.is_pinned()]) for piece in pieces)
            self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            self._side = torch.Stream(device=device)
            # What was in this memory before may be in use until then.
            self._side.wait_event(torch.accelerator.current_stream(device).record_event())
        self._came: torch.Event | None = None

    def place(self, piece: Piece, num_changed: int) -> _Placed:
        """Where a piece will be; the first ``num_changed`` of it are taken back."""
        is_own = [self._side is not None and tensor.is_pinned() for tensor in piece]
        outside = [tensor for tensor, own in zip(piece, is_own, strict=True) if not own]
        places = views(self._host, outside)
        others, in_turn = list(zip(outside, places, strict=True)), iter(places)
        locked = [t if own else next(in_turn) for t, own in zip(piece, is_own, strict=True)]
        last = num_changed - sum(is_own[:num_changed])
        return _Placed(views(self.here, piece), locked, others, num_changed, last)

    def fill(self, placed: _Placed) -> None:
        """Read a piece."""
        for tensor, _ in placed.others:
            expect(tensor)
        for tensor, place in placed.others:
            place.copy_(tensor)
            forget(tensor)
        if self._side is not None:
            with self._side:
                for here, locked in zip(placed.here, placed.locked, strict=True):
                    here.copy_(locked, non_blocking=True)
            self._came = self._side.record_event()

    def arrived(self) -> None:
        """Let the current stream use what is here."""
        if self._came is not None:
            torch.accelerator.current_stream(self.here.device).wait_event(self._came)

    def used(self) -> torch.Event | None:
        """When what was asked of the current stream is done."""
        if self._side is None:
            return None
        return torch.accelerator.current_stream(self.here.device).record_event()

    def take_back(self, placed: _Placed, used: torch.Event | None) -> None:
        """Write a piece."""
        changed = slice(placed.num_changed)
        if self._side is not None and used is not None:
            self._side.wait_event(used)
            with self._side:
                for here, locked in zip(placed.here[changed], placed.locked[changed], strict=True):
                    locked.copy_(here, non_blocking=True)
            self._side.synchronize()
        for tensor, place in placed.others[: placed.num_others_changed]:
            tensor.copy_(place)
            forget(tensor)


def room_bytes(piece: Piece) -> int:
    """What the views of a piece take."""
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in piece)


def views(flat: Tensor, piece: Piece) -> list[Tensor]:
    """Tensors like those of a piece, in flat memory of bytes."""
    found, start = [], 0
    for tensor in piece:
        view = flat[start : start + tensor.nbytes].view(tensor.dtype)
        found.append(view.view(tensor.shape))
        start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return found
