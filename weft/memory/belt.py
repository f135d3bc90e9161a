"""Pieces of what is kept apart on their way to the device, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle

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
    in turn, and as much page-locked memory of the host.
    """

    def __init__(
        self, device: torch.device, pieces: Sequence[Piece], read_only: Sequence[int] = ()
    ) -> None:
        """``read_only``: of each piece, so many tensors at its end are not taken back; empty: all
        are."""
        self._pieces = pieces
        self._changed = [
            piece[: len(piece) - last]
            for piece, last in zip(pieces, read_only or [0] * len(pieces), strict=True)
        ]
        in_turn = (pieces[number::NUM_ROOMS] for number in range(min(NUM_ROOMS, len(pieces))))
        self._rooms = [_Room(device, max(map(room_bytes, each))) for each in in_turn]
        self._reads = ThreadPoolExecutor(1, "reads ahead")
        self._writes = ThreadPoolExecutor(1, "writes behind")

    @property
    def rooms(self) -> list[Tensor]:
        """Memory of the device that it keeps."""
        return [room.here for room in self._rooms]

    def each(self) -> Iterator[list[Tensor]]:
        """Of every piece, copies of its tensors on the device. What the current stream makes of
        them until the next one is asked for is in the tensors when all are done."""
        turns = list(zip(cycle(self._rooms), self._pieces))
        changed = iter(self._changed)
        coming = [self._reads.submit(room.fill, piece) for room, piece in turns[:1]]
        leaving: list[Future[None]] = []
        for number, (room, piece) in enumerate(turns):
            coming[number].result()
            if number + 1 >= NUM_ROOMS:
                leaving[number + 1 - NUM_ROOMS].result()
            coming += [self._reads.submit(r.fill, p) for r, p in turns[number + 1 : number + 2]]
            yield room.arrived(piece)
            leaving.append(self._writes.submit(room.take_back, next(changed), room.used()))
        for each in leaving:
            each.result()


class _Room:
    """Memory of the device for one piece, and of the host where that is another: copies that
    nobody waits for go by way of page-locked memory."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.here = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._host, self._side = self.here, None
        if device.type != HOST:
            self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            self._side = torch.Stream(device=device)
            # What was in this memory before may be in use until then.
            self._side.wait_event(torch.accelerator.current_stream(device).record_event())
        self._came: torch.Event | None = None

    def fill(self, piece: Piece) -> None:
        """Read a piece."""
        for tensor in piece:
            expect(tensor)
        for tensor, view in zip(piece, views(self._host, piece), strict=True):
            view.copy_(tensor)
            forget(tensor)
        if self._side is not None:
            with self._side:
                self.here.copy_(self._host, non_blocking=True)
            self._came = self._side.record_event()

    def arrived(self, piece: Piece) -> list[Tensor]:
        """Copies that the current stream may use."""
        if self._came is not None:
            torch.accelerator.current_stream(self.here.device).wait_event(self._came)
        return views(self.here, piece)

    def used(self) -> torch.Event | None:
        """When what was asked of the current stream is done."""
        if self._side is None:
            return None
        return torch.accelerator.current_stream(self.here.device).record_event()

    def take_back(self, piece: Piece, used: torch.Event | None) -> None:
        """Write a piece."""
        if self._side is not None and used is not None:
            self._side.wait_event(used)
            with self._side:
                self._host.copy_(self.here, non_blocking=True)
            self._side.synchronize()
        for tensor, view in zip(piece, views(self._host, piece), strict=True):
            tensor.copy_(view)
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
