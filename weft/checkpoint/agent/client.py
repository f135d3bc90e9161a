"""A rank's side of its machine's agent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from weft.checkpoint.agent.download import Download, Downloads
from weft.checkpoint.agent.image import Image, new_image
from weft.checkpoint.agent.lease import agent_address
from weft.checkpoint.agent.wire import (
    Commit,
    Failed,
    Forget,
    Hello,
    Memory,
    Message,
    Pushed,
    Save,
    Saved,
    Settle,
    Settled,
    Snapshot,
    Taking,
    Wire,
    Written,
)
from weft.checkpoint.entry import CHUNK_BYTES, JSON
from weft.checkpoint.shard import Shard, bytes_of
from weft.checkpoint.store import hold
from weft.checkpoint.threads import in_threads
from weft.cluster.cluster import HOST

AGENT = "weft.checkpoint.agent"
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What asks a job to stop and save."""
SLOTS = 2
"""Copies of a rank's state that host memory may hold: one is written or kept, one may be taken."""


def start_agent(
    log: Path, root: Path, *, node: str = "", commits: bool = True, keep_s: float = 0.0
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the agent of this machine; it answers at the path. What it complains of is in ``log``.

    It is no part of this process's group or session, and outlives it where there is work left.

    Args:
        root: The folder of checkpoints, or what stands for them on this machine. Where it commits
            it locks that folder as long as it may write there.
        keep_s: How long it keeps what is in memory when nobody holds on to it any more.

    Raises OSError where the machine refuses.
    """
    with ExitStack() as stack:
        held = hold(root) if commits else os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, held)
        path = agent_address(root, node)
        draft = path.with_suffix(f".{os.getpid()}")
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        output = stack.enter_context(log.open("ab"))
        draft.unlink(missing_ok=True)
        listener.bind(str(draft))
        listener.listen(1024)
        # Job systems ask every process that a job began to stop: what it has it still writes.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        draft.replace(path)
        on_error = stack.enter_context(ExitStack())
        on_error.callback(path.unlink, missing_ok=True)
        handles = [listener.fileno(), held]
        words = [handles[0], path, os.getpid(), held, keep_s]
        process = subprocess.Popen(
            [sys.executable, "-m", AGENT, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=handles,
            start_new_session=True,
        )
        on_error.pop_all()
    return process, path


def ask_agent(path: Path, message: Message, answer_s: float) -> Message | None:
    """What the agent at a path answers; None where it does not."""
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(answer_s)
        try:
            end.connect(str(path))
        except OSError:
            return None
        wire = Wire(end)
        wire.send(message)
        return next(iter(wire.read()), None)


class AgentClient:
    """Speaks to the agent for one rank.

    Args:
        slots: Copies that may lie in memory at once.

    Raises OSError where nobody listens at ``path``.
    """

    def __init__(self, path: Path, hello: Hello, *, slots: int = SLOTS) -> None:
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(str(path))
        except OSError:
            end.close()
            raise
        self._wire = Wire(end)
        self._wire.send(hello)
        self._slots = slots
        self._rooms: dict[int, _Room] = {}
        self._busy: set[int] = set()
        self._newest: int | None = None
        self._pushes = hello.pushes
        self._is_on_its_way = False
        self._is_settled = True
        self._events: list[Saved | Failed | Pushed] = []
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

    def events(self) -> list[Saved | Failed | Pushed]:
        """What came of saves since the last call; the rank that commits hears of it."""
        self._listen()
        found, self._events = self._events, []
        return found

    @property
    def is_on_its_way(self) -> bool:
        """The newest copy is not on the other machine yet: the one before must stay."""
        self._listen()
        return self._is_on_its_way and self._wire.is_open

    @property
    def has_room(self) -> bool:
        """There is a place that is neither written nor the newest copy."""
        self._listen()
        return self._free() is not None

    def wait(self) -> None:
        """Return when the agent has written all that anybody gave it, or is gone."""
        self._is_settled = False
        self._wire.send(Settle())
        while not self._is_settled and self._wire.is_open:
            self._hear(self._wire.read())

    def copy(self, shards: Sequence[Shard]) -> int:
        """Copy a rank's state into memory that is free; the number of its place. All ranks have
        copied the save before.

        Raises OSError where there is no memory of that kind.
        """
        slot = self._taken(shards)
        self._rooms[slot].copy(shards)
        return slot

    def begin(
        self, shards: Sequence[Shard], downloads: Downloads, then: Callable[[int], None]
    ) -> Download:
        """The same beside what a device computes: ``then`` is called with the place's number when
        all is copied, in a thread.

        Raises OSError where there is no memory of that kind, and so does the result.
        """
        slot = self._taken(shards)
        return self._rooms[slot].begin(shards, downloads, lambda: then(slot))

    def _taken(self, shards: Sequence[Shard]) -> int:
        """A place with memory for these, which nobody needs."""
        slot = self._free()
        assert slot is not None, "no place to copy to"
        room = self._rooms.get(slot)
        self._wire.send(Taking(slot=slot))
        if room is None or not room.fits(shards):
            image = new_image([shard.piece for shard in shards])
            message = Memory(slot=slot, pieces_bytes=image.pieces_bytes)
            self._wire.send(message, files=[image.handle])
            self._rooms[slot] = _Room(image)
        return slot

    def hand_over(
        self, slot: int, save: Save, *, world_size: int, state: Mapping[str, JSON] | None
    ) -> None:
        """All ranks have copied: what lies in a place is the newest copy, and the agent writes it
        if the save says so.

        Args:
            state: What a checkpoint says besides tensors, from one rank of each machine at least.
        """
        self._newest, self._is_on_its_way = slot, self._pushes
        if save.is_written:
            self._busy.add(slot)
        guard = self._rooms[slot].image.guard(save.name)
        self._wire.send(
            Snapshot(slot=slot, save=save, world_size=world_size, guard=guard, state=state)
        )

    def commit(self, order: Commit) -> None:
        self._wire.send(order)

    def forget(self) -> None:
        """What is in memory is of no use any more."""
        self._wire.send(Forget())

    def close(self) -> None:
        """Leave. What the agent has it still writes."""
        self._wire.close()
        self._rooms.clear()

    def _free(self) -> int | None:
        taken = self._busy | {self._newest}
        return next((slot for slot in range(self._slots) if slot not in taken), None)

    def _listen(self) -> None:
        if self._wire.is_open:
            self._hear(self._wire.poll())

    def _hear(self, messages: Iterable[Message]) -> None:
        for message in messages:
            match message:
                case Written():
                    self._busy.discard(message.slot)
                    self.has_written = True
                case Settled():
                    self._is_settled = True
                case Pushed():
                    self._is_on_its_way = False
                    self._events += [message] if message.problem else []
                case Saved() | Failed():
                    self._events.append(message)
                case _:
                    raise AssertionError(f"the agent said {message}")


class _Room:
    """Memory for one copy of a rank's state.

    It is written as a file is, so that it does not count as this process's own.
    """

    def __init__(self, image: Image) -> None:
        self.image = image

    def fits(self, shards: Sequence[Shard]) -> bool:
        return {shard.piece for shard in shards} == set(self.image.pieces)

    def copy(self, shards: Sequence[Shard]) -> None:
        """What lies in host memory."""
        parts: list[tuple[memoryview, int]] = []
        for shard in shards:
            place = self.image.place(shard.piece).start
            if not shard.tensor.is_contiguous():
                self._write(bytes_of(shard.tensor.detach()), place)  # one such copy at a time
            else:
                parts += _cut(bytes_of(shard.tensor.detach()), place)
        in_threads(self._write, parts)

    def begin(
        self, shards: Sequence[Shard], downloads: Downloads, then: Callable[[], None]
    ) -> Download:
        """Also what lies on a device, in the order of the image; ``then``: all is here."""
        apart = [shard for shard in shards if shard.tensor.device.type != HOST]
        self.copy([shard for shard in shards if shard.tensor.device.type == HOST])
        placed = [(shard.tensor, self.image.place(shard.piece).start) for shard in apart]
        placed.sort(key=lambda each: each[1])
        return downloads.begin(placed, self._write_cut, then)

    def _write_cut(self, data: memoryview, place: int) -> None:
        in_threads(self._write, _cut(data, place))

    def _write(self, data: memoryview, place: int) -> None:
        while data:
            written = os.pwrite(self.image.handle, data, place)
            data, place = data[written:], place + written


def _cut(data: memoryview, place: int) -> list[tuple[memoryview, int]]:
    """As much as one thread writes at a time."""
    starts = range(0, len(data), CHUNK_BYTES)
    return [(data[low : low + CHUNK_BYTES], place + low) for low in starts]
