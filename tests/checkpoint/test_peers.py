"""What one machine has copied is in the memory of another one, too."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_agent import LIMIT_S, Machine, machine, until
from test_kept_copies import in_memory, newest, same_as, steps

from weft.checkpoint.agent.client import ask_agent
from weft.checkpoint.agent.memory import MemoryOfMachine
from weft.checkpoint.agent.peers import get
from weft.checkpoint.agent.wire import Open, Opened, Peer, Pushed
from weft.checkpoint.entry import CheckpointError

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
        image = get((HOST, port), SECRET, "save1", 0)
        assert image.guard("save1") != image.guard("save2")
        with pytest.raises(CheckpointError, match=r"it went away|reset"):
            get((HOST, port), "of another", "save1", 0)
        with pytest.raises(CheckpointError, match="rank 1 is there no more"):
            get((HOST, port), SECRET, "save9", 1)
        port_of(both[0], Open(secret="of the next crew", host=HOST))
        with pytest.raises(CheckpointError, match="cannot be reached"):
            get((HOST, port), SECRET, "save1", 0)
