"""Another machine of a job, and the processes on it, as the head sees them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from typing import Any

from weft.elastic.failure import Failure
from weft.elastic.nodes.link import Link, Words
from weft.elastic.process import Source
from weft.elastic.rank_process import Begin, Heard, Order, Word

END_S = 20.0
"""How long a machine may take to end a process; then it is lost, and ends them by itself."""
_LOST = -1
"""Exit code of a process that went with its machine."""

Pack = Callable[[Begin], Mapping[str, Any]]
"""What another machine makes a target's arguments of, as JSON has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """First words of a machine's command."""

    index: int
    """Of the machine among those of the job."""
    seats: int
    """Ranks that it may have."""
    name: str
    machine: Mapping[str, Any]
    """What it computes with, as the planner is told."""
    chips: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of its accelerators by family, each in the order of their numbers."""
    alike: Mapping[str, Any]
    """What must be the same as on the head, by the name that a message gives it."""


class Node:
    """A machine of the job. Without a ``link`` it is the head's own."""

    def __init__(self, hello: Hello, link: Link | None = None, *, is_late: bool = False) -> None:
        self.hello = hello
        self.link = link
        self.is_late = is_late
        """It came after training had begun."""
        self.is_ready = link is None
        """It accepted the plan."""
        self.refusal: str | None = None
        """Why it does not."""
        self.processes: dict[int, RemoteProcess] = {}
        self._numbers = 0

    @property
    def index(self) -> int:
        return self.hello.index

    @property
    def is_there(self) -> bool:
        return self.link is None or not self.link.lost

    @property
    def words(self) -> str:
        """For people."""
        return f"node {self.index} ({self.hello.name})"

    def start(self, pack: Pack) -> RemoteProcess:
        assert self.link is not None, "the head starts its own processes"
        self._numbers += 1
        process = RemoteProcess(self, self.link, self._numbers, pack)
        self.processes[self._numbers] = process
        return process

    def dismiss(self, why: str) -> None:
        """It is lost to the job, and is told why."""
        if self.link is not None:
            self.link.say(do="bye", code=1, text=f"node 0 goes on without this machine: {why}")
            self.link.drop(why)

    def look(self) -> None:
        """Hand on what it said, without waiting."""
        for words in self.link.heard() if self.link is not None else ():
            match words["is"]:
                case "ready":
                    self.is_ready = True
                case "refused":
                    self.refusal = words["text"]
                case _:
                    process = self.processes.get(words["id"])
                    if process is not None:
                        process.take(words)


class RemoteProcess:
    """One of another machine's."""

    def __init__(self, node: Node, link: Link, number: int, pack: Pack) -> None:
        self.node = node
        self._link, self._number, self._pack = link, number, pack
        self._exitcode: int | None = None
        self._said = deque[Word]()
        self._phase = ""
        self._report: Failure | None = None
        link.say(do="start", id=number)

    @property
    def exitcode(self) -> int | None:
        return _LOST if self._exitcode is None and self._link.lost else self._exitcode

    @property
    def loss(self) -> str:
        if self._exitcode is not None or not self._link.lost:
            return ""
        return f"was lost with {self.node.words}: {self._link.lost}"

    @property
    def can_be_replaced(self) -> bool:
        return True

    @property
    def sources(self) -> Sequence[Source]:
        return () if self._link.lost else (self._link.fileno(),)

    def tell(self, order: Order) -> None:
        if not isinstance(order, Begin):
            self._link.say(do="order", id=self._number, order=order)
            return
        self._phase, self._report = "", None
        self._said.clear()
        address = order.address
        self._link.say(
            do="begin",
            id=self._number,
            address={
                "rank": address.rank,
                "world_size": address.world_size,
                "local_rank": address.local_rank,
                "ranks_here": address.ranks_here,
                "card": address.card,
                "meeting": address.meeting,
            },
            port=address.master[1],
            args=self._pack(order),
            epoch=order.epoch,
            may_go_on=order.may_go_on,
        )

    def words(self) -> Iterator[Word]:
        self.node.look()
        while self._said:
            yield self._said.popleft()

    def take(self, words: Words) -> None:
        """What its machine says of it."""
        self._phase = words["phase"]
        report = words["report"]
        self._report = None if report is None else Failure(**report)
        if words["is"] == "ended":
            self._exitcode = words["code"]
            self.node.processes.pop(self._number, None)
        else:
            self._said.append(from_words(words["word"]))

    def phase(self) -> str:
        return self._phase

    def report(self) -> Failure | None:
        return self._report

    def terminate(self) -> None:
        self._link.say(do="terminate", id=self._number)

    def join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.exitcode is None and (left_s := deadline - time.monotonic()) > 0:
            wait(self.sources, left_s)
            self.node.look()

    def end(self) -> None:
        self._link.say(do="kill", id=self._number)
        self.join(END_S)
        if self.exitcode is None:
            self.node.dismiss("it did not end a process")


def to_words(word: Word) -> Mapping[str, Any]:
    """As they are sent."""
    match word:
        case Failure():
            return {"failure": asdict(word)}
        case Heard():
            return {"heard": word.epoch}
    return {"said": word}


def from_words(words: Words) -> Word:
    """What ``to_words`` was given."""
    if "failure" in words:
        return Failure(**words["failure"])
    if "heard" in words:
        return Heard(words["heard"])
    said: Word = words["said"]
    return said
