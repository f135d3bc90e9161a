"""What one machine has copied is in the memory of another one, too."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_agent import LIMIT_S, Machine, machine, until
from test_kept_copies import in_memory, newest, same_as, steps

from weft.checkpoint.agent.agent import Agent
from weft.checkpoint.agent.client import AgentClient, ask_agent
from weft.checkpoint.agent.image import Image, new_image
from weft.checkpoint.agent.memory import MemoryOfMachine
from weft.checkpoint.agent.peers import Facts, PeerServer, get
from weft.checkpoint.agent.wire import Hello, Open, Opened, Peer, Pushed
from weft.checkpoint.entry import CheckpointError
from weft.comm import proven

HOST, SECRET = "127.0.0.1", "of this job"


def port_of(one: Machine, message: Open | Peer) -> int:
    answer = ask_agent(one.socket, message, LIMIT_S)
    assert isinstance(answer, Opened) and answer.port
    return answer.port


@contextmanager
def pair(tmp_path: Path) -> Iterator[tuple[list[Machine], list[int]]]:
    """Two machines of a rank each, which keep each other's copies; their ports."""
    root = tmp_path / "checkpoints"
    with (
        machine(tmp_path / "a", root, [0], pushes=True) as first,
        machine(tmp_path / "b", root, [1], pushes=True) as second,
    ):
        both = [first, second]
        ports = [port_of(one, Open(secret=SECRET, host=HOST)) for one in both]
        for one, port in zip(both, reversed(ports), strict=True):
            assert port_of(one, Peer(host=HOST, port=port, secret=SECRET)) == port
        yield both, ports


def pushed(machines: list[Machine]) -> bool:
    return not any(client.is_on_its_way for one in machines for client in one.ranks.values())


def test_a_machine_that_is_lost_is_in_the_memory_of_the_other(tmp_path: Path) -> None:
    with pair(tmp_path) as (both, _):
        first, second = both
        for step in (1, 2, 3):
            in_memory(second, step, 1)
            in_memory(first, step, 0)
            until(lambda: pushed(both))
        with MemoryOfMachine(first.root, first.node) as memory:
            assert [(each.step, each.ranks) for each in memory.offers][-1] == (3, [0, 1])
        same_as(newest(first), 3)
        second.process.kill()
        second.process.wait()
        same_as(newest(first), 3)
        assert first.ranks[0].events() == []
        in_memory(first, 4, 0)
        until(lambda: pushed([first]))
        (lost,) = first.ranks[0].events()
        assert isinstance(lost, Pushed)
        assert lost.problem.startswith(f"memory of {HOST}:")


def test_a_slow_machine_holds_nobody_up(tmp_path: Path) -> None:
    """Whoever asks first knows that the copy before must stay."""
    with pair(tmp_path) as (both, _):
        first, second = both
        os.kill(second.process.pid, signal.SIGSTOP)
        in_memory(first, 1, 0)
        assert first.ranks[0].is_on_its_way
        os.kill(second.process.pid, signal.SIGCONT)
        until(lambda: pushed([first]))
        assert steps(second) == [1]


def test_only_who_knows_the_secret_gets_a_copy(tmp_path: Path) -> None:
    with pair(tmp_path) as (both, (port, _)):
        in_memory(both[0], 1, 0)
        assert steps(both[0]) == [1], "who asks another way may be heard before"
        image = get((HOST, port), SECRET, "save1", 0)
        assert image.guard("save1") != image.guard("save2")
        with pytest.raises(CheckpointError, match=r"it went away|reset"):
            get((HOST, port), "of another", "save1", 0)
        with pytest.raises(CheckpointError, match="rank 1 is there no more"):
            get((HOST, port), SECRET, "save9", 1)
        port_of(both[0], Open(secret="of the next crew", host=HOST))
        with pytest.raises(CheckpointError, match="cannot be reached"):
            get((HOST, port), SECRET, "save1", 0)


def test_a_crew_that_pushes_nothing_ends_the_orders_of_an_earlier_one(tmp_path: Path) -> None:
    with pair(tmp_path) as (both, _):
        first, second = both
        in_memory(first, 1, 0)
        until(lambda: pushed([first]))
        hello = Hello(rank=0, ranks_here=1, commits=True, crew="second")
        before, first.ranks[0] = first.ranks[0], AgentClient(first.socket, hello)
        before.close()
        in_memory(first, 2, 0)
        assert steps(first) == [1, 2]
        assert first.leave() == 0, "it ends when everything is pushed"
        assert steps(second) == [1]


class Shelf:
    """Gives one image when it is let."""

    def __init__(self) -> None:
        self.image, self.asked, self.may = new_image([]), threading.Event(), threading.Event()

    def give(self, name: str, _: int) -> tuple[Image, int]:
        self.asked.set()
        assert self.may.wait(LIMIT_S)
        return self.image, self.image.guard(name)

    def take(self, facts: Facts, image: Image) -> None:
        pass


def test_an_agent_stays_for_whoever_takes_a_copy(tmp_path: Path) -> None:
    """Others of the job; those who do not know the secret are as nobody."""
    shelf = Shelf()
    server = PeerServer(HOST, SECRET, shelf)
    (tmp_path / "agent").touch()
    agent = Agent(socket.socket(), tmp_path / "agent", 0, root=0, keep_s=0.0)
    agent._server = server
    strangers = [socket.create_connection((HOST, server.port)) for _ in range(3)]
    assert not agent._is_needed()
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(get, (HOST, server.port), SECRET, "save", 0)
        assert shelf.asked.wait(LIMIT_S)
        assert agent._is_needed()
        shelf.may.set()
        assert got.result().guard("save") == shelf.image.guard("save")
    until(lambda: not agent._is_needed())
    server.close()
    for each in (*strangers, agent._done, agent._tell, agent._listener):
        each.close()


def test_who_proves_nothing_has_a_place_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes just before it would be given up."""
    now = [0.0]

    class Dripping:
        sent = 0

        def sendall(self, _: bytes) -> None:
            pass

        def recv_into(self, data: memoryview) -> int:
            now[0] += proven.QUIET_S - 1
            self.sent += 1
            return 1

    monkeypatch.setattr(proven, "time", SimpleNamespace(monotonic=lambda: now[0]))
    end: Any = Dripping()
    with pytest.raises(TimeoutError, match="it is too slow"):
        proven.prove(end, b"", is_server=True)
    assert end.sent == 2


def test_strangers_take_no_more_than_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes after them waits for one."""
    monkeypatch.setattr(proven, "UNPROVEN", 2)
    shelf = Shelf()
    shelf.may.set()
    server = PeerServer(HOST, SECRET, shelf)
    strangers = [socket.create_connection((HOST, server.port)) for _ in range(2)]
    for each in strangers:
        each.recv(1)  # it has its place
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(get, (HOST, server.port), SECRET, "save", 0)
        assert not shelf.asked.wait(0.2)
        strangers.pop().close()
        assert got.result().guard("save") == shelf.image.guard("save")
    strangers.pop().close()
    server.close()
