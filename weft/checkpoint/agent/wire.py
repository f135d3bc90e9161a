"""What ranks and their agent say to each other: a line of JSON each, over a socket of the machine.

A rank's memory is handed over as an open file, which lives as long as anyone holds it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, get_args

from weft.checkpoint.draft import Draft, draft
from weft.checkpoint.entry import JSON
from weft.checkpoint.place import Place, place_of
from weft.checkpoint.remote.owner import Owner

_READ = 1 << 16
_MOST_FILES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """A rank's first words."""

    kind: ClassVar[str] = "hello"
    rank: int
    ranks_here: int
    """How many of them will speak to this agent."""
    commits: bool
    """It says when a checkpoint is to be made of what all ranks wrote."""
    crew: str = ""
    """Of all who begin together. Another one may follow when they have gone."""
    pushes: bool = False
    """The agent was told to put a copy into another machine's memory; an order of an earlier crew
    is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory that a rank will copy its state into; the open file comes with the message.

    It begins with the bytes of the rank's file, and the pieces in it follow as JSON.
    """

    kind: ClassVar[str] = "memory"
    slot: int
    pieces_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Taking:
    """What lies in a place changes from now on. All ranks of the job have copied the save before
    this one by then."""

    kind: ClassVar[str] = "taking"
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """One save of all ranks."""

    root: str
    step: int
    name: str
    """Of this save alone: an earlier one of the same step may have left files."""
    timeout_s: float
    """How long other machines may take for their part after this one."""
    is_written: bool = True
    """It becomes a checkpoint; else it stays in memory."""

    @property
    def place(self) -> Place:
        return place_of(self.root)

    def draft(self, owner: Owner | None = None) -> Draft:
        """Its part in the storage."""
        return draft(self.place, self.step, self.name, owner)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A rank's state lies in its memory; if it is to be written, until it hears ``Written``."""

    kind: ClassVar[str] = "snapshot"
    slot: int
    save: Save
    world_size: int
    guard: int
    """Of the image (``Image.guard``)."""
    state: Mapping[str, JSON] | None
    """What a checkpoint says besides tensors, from one rank of each machine at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """Make a checkpoint of what all ranks write."""

    kind: ClassVar[str] = "commit"
    save: Save
    keep: int
    """How many checkpoints stay."""
    owner: Owner | None = None
    """Far away: the run that says so."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Settle:
    """Say when everything that was begun is written or discarded."""

    kind: ClassVar[str] = "settle"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """It is."""

    kind: ClassVar[str] = "settled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Forget:
    """What is in memory is of no use any more."""

    kind: ClassVar[str] = "forget"


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """Answer to other machines of the job, who know the secret, at an address of this one."""

    kind: ClassVar[str] = "open"
    secret: str
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """At this port; 0: it cannot."""

    kind: ClassVar[str] = "opened"
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Put a copy of every save there, too. The answer is ``Opened``."""

    kind: ClassVar[str] = "peer"
    host: str
    port: int
    secret: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """The copy that this machine made last is on the other machine, or cannot get there."""

    kind: ClassVar[str] = "pushed"
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What is in memory?"""

    kind: ClassVar[str] = "ask"


@dataclass(frozen=True, kw_only=True, slots=True)
class Offers:
    """What is: ``Offer``s as JSON, the oldest first."""

    kind: ClassVar[str] = "offers"
    offers: Sequence[Mapping[str, Any]]
    latest: str
    """The checkpoint that this agent made last; empty: it made none."""
    num_bytes: int
    """Of all that is in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch:
    """Hand over all of one save: ``State``, and a ``Copy`` for each rank in the offer."""

    kind: ClassVar[str] = "fetch"
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What a checkpoint would say besides tensors; None: it is not here any more."""

    kind: ClassVar[str] = "state"
    state: Mapping[str, JSON] | None
    num_copies: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """The state of a rank; the open file of it comes with the message."""

    kind: ClassVar[str] = "copy"
    rank: int
    pieces_bytes: int
    guard: int


Message = (
    Hello | Memory | Taking | Snapshot | Commit | Written | Saved | Failed | Settle | Settled
    | Forget | Open | Opened | Peer | Pushed | Ask | Offers | Fetch | State | Copy
)  # fmt: skip
_KINDS: dict[str, Any] = {each.kind: each for each in get_args(Message)}


class Wire:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._unread = b""
        self._files: deque[int] = deque()
        self._sends = threading.Lock()
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
            with self._sends:
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
    if data.get("owner"):
        data["owner"] = Owner(**data["owner"])
    made: Message = kind(**data)
    return made
