"""A rank's side of its machine's agent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.agent.image import Image, new_image
from weft.checkpoint.agent.wire import (
    Commit,
    Failed,
    Hello,
    Memory,
    Message,
    Save,
    Saved,
    Snapshot,
    Wire,
    Written,
)
from weft.checkpoint.entry import Piece
from weft.checkpoint.shard import DTYPES, Shard
from weft.checkpoint.store import hold

SLOTS = 2
"""Copies of a rank's state that host memory may hold: one is written, one may be taken."""


def start_agent(log: Path, root: Path | None) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the agent of this machine; it answers at the path. What it complains of is in ``log``.

    It is no part of this process's group or session, and outlives it where there is work left.
    ``root``: checkpoints that it commits: it holds the folder as long as it lives.

    Raises OSError where the machine refuses.
    """
    held = () if root is None else (hold(root),)
    folder = Path(tempfile.mkdtemp(prefix="weft-agent-"))
    with socket.socket(socket.AF_UNIX) as listener, log.open("ab") as output:
        listener.bind(str(folder / "socket"))
        listener.listen(1024)
        process = subprocess.Popen(
            [sys.executable, "-m", "weft.checkpoint.agent", str(listener.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(listener.fileno(), *held),
            start_new_session=True,
        )
    for handle in held:
        os.close(handle)
    return process, folder / "socket"


class AgentClient:
    """Speaks to the agent for one rank.

    Raises OSError where nobody listens at ``path``.
    """

    def __init__(self, path: Path, hello: Hello) -> None:
        end = socket.socket(socket.AF_UNIX)
        end.connect(str(path))
        self._wire = Wire(end)
        self._wire.send(hello)
        self._views: dict[int, _Views] = {}
        self._busy: set[int] = set()
        self._events: list[Saved | Failed] = []

    @property
    def is_alive(self) -> bool:
        """The agent has not ended, as far as is known."""
        self._listen()
        return self._wire.is_open

    @property
    def num_waiting(self) -> int:
        """Copies of this rank's state that it still needs."""
        self._listen()
        return len(self._busy)

    def events(self) -> list[Saved | Failed]:
        """What came of saves since the last call; the rank that commits hears of it."""
        self._listen()
        found, self._events = self._events, []
        return found

    def wait(self) -> None:
        """Return when the agent needs no memory of this rank, or is gone."""
        while self._busy and self._wire.is_open:
            self._hear(self._wire.read())

    def copy(self, shards: Sequence[Shard]) -> int:
        """Copy a rank's state into memory that is free; the number of its place.

        Raises OSError where there is no memory of that kind.
        """
        slot = next(slot for slot in range(SLOTS) if slot not in self._busy)
        views = self._views.get(slot)
        if views is None or not views.fits(shards):
            image, handle, pieces_bytes = new_image([shard.piece for shard in shards])
            self._wire.send(Memory(slot=slot, pieces_bytes=pieces_bytes), files=[handle])
            os.close(handle)
            views = self._views[slot] = _Views(image)
        views.copy(shards)
        return slot

    def write(self, slot: int, save: Save) -> None:
        """The agent may write what lies in a place, and says when it has."""
        self._busy.add(slot)
        self._wire.send(Snapshot(slot=slot, save=save))

    def commit(self, order: Commit) -> None:
        self._wire.send(order)

    def close(self) -> None:
        """Leave. What the agent has it still writes."""
        self._wire.close()
        self._views.clear()

    def _listen(self) -> None:
        if self._wire.is_open:
            self._hear(self._wire.poll())

    def _hear(self, messages: Iterable[Message]) -> None:
        for message in messages:
            match message:
                case Written():
                    self._busy.discard(message.slot)
                case Saved() | Failed():
                    self._events.append(message)
                case _:
                    raise AssertionError(f"the agent said {message}")


class _Views:
    """An image as the tensors in it."""

    def __init__(self, image: Image) -> None:
        self._views = {piece: _view(image, piece) for piece in image.pieces}

    def fits(self, shards: Sequence[Shard]) -> bool:
        return {shard.piece for shard in shards} == self._views.keys()

    @torch.no_grad()
    def copy(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            self._views[shard.piece].copy_(shard.tensor)


def _view(image: Image, piece: Piece) -> Tensor:
    if not piece.nbytes:
        return torch.empty(piece.box.size, dtype=DTYPES[piece.dtype])
    flat = torch.frombuffer(image.data(piece), dtype=torch.uint8)
    return flat.view(DTYPES[piece.dtype]).view(piece.box.size)
