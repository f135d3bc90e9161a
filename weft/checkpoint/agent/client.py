"""A rank's side of its machine's agent."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

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
from weft.checkpoint.shard import Shard, bytes_of
from weft.checkpoint.store import hold

AGENT = "weft.checkpoint.agent"
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What asks a job to stop and save."""
SLOTS = 2
"""Copies of a rank's state that host memory may hold: one is written, one may be taken."""


def start_agent(log: Path, root: Path | None) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the agent of this machine; it answers at the path. What it complains of is in ``log``.

    It is no part of this process's group or session, and outlives it where there is work left.
    ``root``: of the checkpoints that it commits, or of what stands for them on this machine: it
    holds that folder as long as it lives.

    Raises OSError where the machine refuses.
    """
    with ExitStack() as stack:
        held = []
        if root is not None:
            held.append(hold(root))
            stack.callback(os.close, held[0])
        folder = Path(tempfile.mkdtemp(prefix="weft-agent-"))
        on_error = stack.enter_context(ExitStack())
        on_error.callback(shutil.rmtree, folder, ignore_errors=True)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        output = stack.enter_context(log.open("ab"))
        listener.bind(str(folder / "socket"))
        listener.listen(1024)
        # Job systems ask every process that a job began to stop: what it has it still writes.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        process = subprocess.Popen(
            [sys.executable, "-m", AGENT, str(listener.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(listener.fileno(), *held),
            start_new_session=True,
        )
        on_error.pop_all()
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
        self._rooms: dict[int, _Room] = {}
        self._busy: set[int] = set()
        self._events: list[Saved | Failed] = []
        self.has_written = False
        """It has done its work at least once."""

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
        room = self._rooms.get(slot)
        if room is None or not room.fits(shards):
            if room is not None:
                room.close()
            image, handle, pieces_bytes = new_image([shard.piece for shard in shards])
            self._wire.send(Memory(slot=slot, pieces_bytes=pieces_bytes), files=[handle])
            room = self._rooms[slot] = _Room(image, handle)
        room.copy(shards)
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
        for room in self._rooms.values():
            room.close()
        self._rooms.clear()

    def _listen(self) -> None:
        if self._wire.is_open:
            self._hear(self._wire.poll())

    def _hear(self, messages: Iterable[Message]) -> None:
        for message in messages:
            match message:
                case Written():
                    self._busy.discard(message.slot)
                    self.has_written = True
                case Saved() | Failed():
                    self._events.append(message)
                case _:
                    raise AssertionError(f"the agent said {message}")


class _Room:
    """Memory for one copy of a rank's state.

    What lies in host memory is written into it as into a file, so that it does not count as this
    process's own; a device's tensors are copied into a view of it.
    """

    def __init__(self, image: Image, handle: int) -> None:
        self._image = image
        self._handle = handle

    def fits(self, shards: Sequence[Shard]) -> bool:
        return {shard.piece for shard in shards} == set(self._image.pieces)

    @torch.no_grad()
    def copy(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            if shard.tensor.device.type == "cpu":
                self._write(bytes_of(shard.tensor.detach()), self._image.place(shard.piece).start)
            elif shard.piece.nbytes:
                flat = torch.frombuffer(self._image.data(shard.piece), dtype=torch.uint8)
                view = flat.view(shard.tensor.dtype).view(shard.piece.box.size)
                view.copy_(shard.tensor)

    def close(self) -> None:
        os.close(self._handle)

    def _write(self, data: memoryview, place: int) -> None:
        while data:
            written = os.pwrite(self._handle, data, place)
            data, place = data[written:], place + written
