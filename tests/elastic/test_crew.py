"""What a launcher and its ranks say to one another, without processes."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.comm.address import RankAddress
from weft.elastic import crew, rank_process
from weft.elastic.crew import STILL_S, Crew
from weft.elastic.failure import Epoch, Failure
from weft.elastic.process import ThisMachine
from weft.elastic.processes import _next
from weft.elastic.rank_process import Begin, Heard
from weft.elastic.signals import Asked

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


class Ranks:
    """A crew, its ends of the pipes, and the time."""

    def __init__(self, folder: Path, size: int) -> None:
        self.now = 1e6
        self.size, self.ends = size, list[Connection]()
        context: Any = SimpleNamespace(Pipe=self._pipe, Process=NoProcess)
        machine = ThisMachine("no:target", folder, folder, context)
        self.crew = Crew(machine, folder, may_go_on=True, heartbeat_s=HEARTBEAT_S)

    def _pipe(self) -> tuple[Connection, Any]:
        ours, theirs = multiprocessing.Pipe()
        self.ends.append(theirs)
        return ours, SimpleNamespace(close=lambda: None)

    @property
    def rank(self) -> Connection:
        return self.ends[0]

    def begins(self) -> Begin:
        self.crew.begin(Epoch((), self.size))
        begin: Begin
        begin, *_ = [end.recv() for end in self.ends]
        return begin

    def looks(self, seconds: int) -> None:
        """Once a second."""
        for _ in range(seconds):
            self.now += 1
            self.crew._look()

    @property
    def process(self) -> Any:
        return self.crew._ranks[0]


@contextmanager
def ranks(folder: Path, size: int) -> Iterator[Ranks]:
    found = Ranks(folder, size)
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(monotonic=lambda: found.now, monotonic_ns=lambda: 0)
        patch.setattr(crew, "time", clock)
        patch.setattr(crew, "LOOK_S", 0.0)
        yield found
    for rank in found.crew._ranks.values():
        rank.process.end()
        rank.process._process.close()  # type: ignore[attr-defined]
    for end in found.ends:
        end.close()


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Ranks]:
    with ranks(tmp_path, 1) as one:
        yield one


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Ranks]:
    with ranks(tmp_path, 2) as two:
        yield two


def test_a_launcher_that_stood_still_asks_again(one: Ranks) -> None:
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


def test_time_in_which_a_launcher_stood_still_is_no_grace(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z just after a failure, and an hour later ``fg``: the other rank stood still, too."""
    two.begins()
    lost: Any = two.crew._ranks[1]
    lost.process._process.kill()

    def come() -> None:
        two.rank.send(Heard(1))
        two.rank.send(Failure(0, "peer", "the others are gone"))

    moments = iter([(0.1, list), (3600.0, list), (0.1, come)])

    def wait(_: object, __: float) -> None:
        seconds, what = next(moments)
        two.now += seconds
        what()

    monkeypatch.setattr(crew, "wait", wait)
    monkeypatch.setattr(crew, "LOOK_S", 0.2)
    two.crew.watch(Asked())
    assert two.process.is_at_door
    found = {failure.rank: failure for failure in two.crew.failures()}
    assert (found[0].message, found[0].is_gone) == ("the others are gone", False)
    assert found[1].is_gone


@pytest.mark.parametrize("is_up", [False, True])
def test_a_process_that_is_not_up_yet_is_not_lost_with_another(
    two: Ranks, monkeypatch: pytest.MonkeyPatch, is_up: bool
) -> None:
    """On a busy machine that takes longer than an answer of one that is up and hears."""
    two.begins()
    two.crew._ranks[1].process.end()

    def come() -> None:
        two.rank.send(Heard(1))
        two.rank.send(Failure(0, "peer", "the others are gone"))

    begun = (lambda: two.rank.send("alive")) if is_up else list
    moments = iter([(0.1, begun), *[(1.0, list)] * 10, (0.1, come)])

    def wait(_: object, __: float) -> None:
        seconds, what = next(moments)
        two.now += seconds
        what()

    monkeypatch.setattr(crew, "wait", wait)
    monkeypatch.setattr(crew, "LOOK_S", 1.0)
    two.crew.watch(Asked())
    lost = [failure.rank for failure in two.crew.failures() if failure.is_gone]
    assert lost == ([0, 1] if is_up else [1])


def test_a_rank_that_is_killed_when_it_has_come_is_lost(two: Ranks) -> None:
    """All left for another plan; the job goes on as after any loss."""
    two.begins()
    for end in two.ends:
        end.send("moved")
    two.looks(1)
    assert two.crew.has_come
    assert not two.crew.failures()
    two.crew._ranks[1].process._process.kill()  # type: ignore[attr-defined]
    assert not two.crew.has_come
    (lost,) = two.crew.failures()
    assert (lost.rank, lost.cause, lost.is_gone) == (1, "signal", True)
    assert lost.message == "was ended by SIGKILL from outside"
    again = Epoch((), 2)
    assert _next(two.crew, [lost], Asked(), lambda _: again, None) is again


def test_what_was_heard_in_an_earlier_epoch_counts_for_nothing(one: Ranks) -> None:
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
    assert launcher.recv() == "alive"
    launcher.send(Begin(RankAddress(), (), tmp_path, epoch=7))
    began = control.orders.get()
    assert began is not None
    began[1].then(undo)
    launcher.send("abort")
    assert launcher.recv() == Heard(7)
    assert ended.wait(60)
    assert codes == [1]
    assert "KeyError: 'a mistake'" in capfd.readouterr().err
