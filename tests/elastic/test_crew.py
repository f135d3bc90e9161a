"""What a launcher and its ranks say to one another, without processes."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.comm.address import RankAddress
from weft.elastic import crew, rank_process
from weft.elastic.crew import STILL_S, Crew
from weft.elastic.failure import Epoch, Failure
from weft.elastic.rank_process import Begin, Heard

HEARTBEAT_S = 60.0


class NoProcess:
    """Stands in for one that is up until it is killed."""

    def __init__(self, **_: object) -> None:
        self.exitcode: int | None = None
        self.sentinel, self._end = os.pipe()

    def start(self) -> None:
        pass

    def join(self) -> None:
        pass

    def close(self) -> None:
        os.close(self.sentinel)
        os.close(self._end)

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        self.exitcode = -9


class OneRank:
    """A crew of one, its end of the pipe, and the time."""

    def __init__(self, folder: Path) -> None:
        self.now = 1e6
        ours, self.rank = multiprocessing.Pipe()
        context: Any = SimpleNamespace(
            Pipe=lambda: (ours, SimpleNamespace(close=lambda: None)), Process=NoProcess
        )
        self.crew = Crew(
            "no:target", folder, folder, context, may_go_on=True, heartbeat_s=HEARTBEAT_S
        )

    def begins(self) -> Begin:
        self.crew.begin(Epoch((), 1))
        begin: Begin = self.rank.recv()
        return begin

    def looks(self, seconds: int) -> None:
        """Once a second."""
        for _ in range(seconds):
            self.now += 1
            self.crew._look()

    @property
    def process(self) -> Any:
        return self.crew._processes[0]


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneRank]:
    one = OneRank(tmp_path)
    clock = SimpleNamespace(monotonic=lambda: one.now, monotonic_ns=lambda: 0)
    monkeypatch.setattr(crew, "time", clock)
    monkeypatch.setattr(crew, "LOOK_S", 0.0)
    yield one
    one.process.end()
    one.process.process.close()
    one.rank.close()


def test_a_launcher_that_stood_still_asks_again(one: OneRank) -> None:
    """Ctrl-Z stops the ranks too: after ``fg`` they have as long as ever to answer."""
    one.begins()
    one.looks(16)
    assert one.rank.recv() == "ping"
    one.now += 3600
    one.looks(1)
    assert one.rank.recv() == "ping"
    one.looks(int(HEARTBEAT_S))
    assert one.process.is_at_work
    one.looks(1)
    (lost,) = one.crew.failures()
    said = "did not answer for 60 s (recovery.heartbeat_s) and had to be ended"
    assert (lost.cause, lost.message) == ("peer", said)
    assert STILL_S < HEARTBEAT_S / 4


def test_what_was_heard_in_an_earlier_epoch_counts_for_nothing(one: OneRank) -> None:
    """A rank that came to the door just before it was told to."""
    first = one.begins()
    one.rank.send(Failure(0, "peer", "the others are gone"))
    one.looks(1)
    assert one.process.is_at_door
    one.rank.send(Heard(first.epoch))
    second = one.begins()
    one.looks(1)
    assert one.process.is_at_work and not one.process.heard
    one.rank.send(Heard(second.epoch))
    one.looks(1)
    assert one.process.is_at_work and one.process.heard


def test_a_rank_that_cannot_end_its_epoch_ends_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody else hears the launcher."""
    codes, ended = list[int](), threading.Event()

    def exits(code: int) -> None:
        codes.append(code)
        ended.set()

    def undo() -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(rank_process.os, "_exit", exits)
    launcher, pipe = multiprocessing.Pipe()
    control = rank_process._Control(pipe)
    launcher.send(Begin(RankAddress(), (), tmp_path, epoch=7))
    began = control.orders.get()
    assert began is not None
    began[1].then(undo)
    launcher.send("abort")
    assert launcher.recv() == Heard(7)
    assert ended.wait(60)
    assert codes == [1]
    assert "KeyError: 'a mistake'" in capfd.readouterr().err
