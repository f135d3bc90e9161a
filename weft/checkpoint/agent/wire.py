"""What ranks and their agent say to each other: a line of JSON each, over a socket of the machine.

A rank's memory is handed over as an open file, which lives as long as anyone holds it.
"""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from weft.checkpoint.draft import Draft, draft
from weft.checkpoint.entry import JSON
from weft.checkpoint.place import Place, place_of

_READ = 1 << 16
_MOST_FILES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """A rank's first words."""

    kind: ClassVar[str] = "hello"
    rank: int
    ranks_here: int
    """How many will speak to this agent."""
    commits: bool
    """It says when a checkpoint is to be made of what all ranks wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory that a rank will copy its state into; the open file comes with the message.

    It begins with the bytes of the rank's file, and the pieces in it follow as JSON.
    """

    kind: ClassVar[str] = "memory"
    slot: int
    pieces_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """One save of all ranks."""

    root: str
    step: int
    name: str
    """Of this save alone: an earlier one of the same step may have left files."""
    timeout_s: float
    """How long other machines may take for their part after this one."""

    @property
    def place(self) -> Place:
        return place_of(self.root)

    def draft(self) -> Draft:
        """Its part in the storage."""
        return draft(self.place, self.step, self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A rank's state lies in its memory, and stays until it hears ``Written``."""

    kind: ClassVar[str] = "snapshot"
    slot: int
    save: Save


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """Make a checkpoint of what all ranks write."""

    kind: ClassVar[str] = "commit"
    save: Save
    world_size: int
    state: Mapping[str, JSON]
    keep: int
    """How many checkpoints stay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The agent needs this memory no more."""

    kind: ClassVar[str] = "written"
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint was made."""

    kind: ClassVar[str] = "saved"
    step: int
    seconds: float
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """None was made of this step, and nothing is left of it."""

    kind: ClassVar[str] = "failed"
    step: int
    problem: str


Message = Hello | Memory | Snapshot | Commit | Written | Saved | Failed
_KINDS = {c.kind: c for c in (Hello, Memory, Snapshot, Commit, Written, Saved, Failed)}


class Wire:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._unread = b""
        self._files: deque[int] = deque()
        self.is_open = True
        """The other end has not gone, as far as is known."""
        self.has_ended = False
        """Nothing is left to be read, and nothing more will come."""

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Tell the other end; nothing happens where it is gone."""
        line = json.dumps({"kind": message.kind, **asdict(message)}).encode() + b"\n"
        try:
            if files:
                sent = socket.send_fds(self._end, [line], list(files))
                line = line[sent:]
            self._end.sendall(line)
        except OSError:
            self.is_open = False

    def read(self) -> list[Message]:
        """What came: waits for something if the socket does. Ends ``is_open`` at the last."""
        try:
            data, files, _, _ = socket.recv_fds(self._end, _READ, _MOST_FILES)
        except BlockingIOError:
            return []
        except OSError:
            data, files = b"", []
        self._files += files
        self.has_ended = not data
        self.is_open = self.is_open and bool(data)
        *lines, self._unread = (self._unread + data).split(b"\n")
        return list(map(_parsed, lines))

    def poll(self) -> Iterator[Message]:
        """All that has come by now, without waiting."""
        self._end.setblocking(False)
        try:
            while found := self.read():
                yield from found
        finally:
            self._end.setblocking(True)

    def take_file(self) -> int:
        """The open file that came with a message."""
        return self._files.popleft()

    def close(self) -> None:
        while self._files:
            os.close(self._files.popleft())
        self._end.close()
        self.is_open = False


def _parsed(line: bytes) -> Message:
    data: dict[str, Any] = json.loads(line)
    kind = _KINDS[data.pop("kind")]
    if "save" in data:
        data["save"] = Save(**data["save"])
    made: Message = kind(**data)
    return made
