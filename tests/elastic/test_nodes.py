"""What machines of a job say to one another, without ranks."""

import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.comm.address import RankAddress
from weft.comm.proven import say
from weft.config.errors import ConfigError
from weft.elastic.failure import Failure
from weft.elastic.nodes import link as link_module
from weft.elastic.nodes.fleet import Fleet, Place, first_places
from weft.elastic.nodes.head import Head
from weft.elastic.nodes.link import Link
from weft.elastic.nodes.meeting import Where, bound_to
from weft.elastic.nodes.member import connected
from weft.elastic.nodes.remote import Hello, Node, from_words, to_words
from weft.elastic.rank_process import Heard, Word
from weft.train.run_folder import NODES_FILE

LIMIT_S = 60.0
QUIET_S = 40.0


def pair() -> tuple[Link, socket.socket]:
    """One end as a launcher has it, without a thread that speaks; and the bare other one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    link = Link(ours, 0.0)
    link._quiet_s = QUIET_S
    return link, theirs


@contextmanager
def clock() -> Iterator[SimpleNamespace]:
    """Time as links know it, which a test sets."""
    now = SimpleNamespace(s=1e6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_module, "time", SimpleNamespace(monotonic=lambda: now.s))
        yield now


def listens(link: Link, now: SimpleNamespace, seconds: float) -> None:
    """Once a second."""
    for _ in range(int(seconds)):
        now.s += 1
        link.heard()


def hello(index: int, **more: Any) -> Hello:
    return Hello(index=index, seats=2, name=f"host{index}", machine={}, alike={"seed": 1} | more)


def until_heard(link: Link) -> list[Any]:
    while not (found := link.heard()) and not link.lost:
        pass
    return found


def test_a_machine_that_is_silent_is_lost() -> None:
    with clock() as now:
        link, theirs = pair()
        listens(link, now, QUIET_S - 1)
        say(theirs, {})
        listens(link, now, QUIET_S)
        assert not link.lost
        now.s += 3600  # nobody listened, as after Ctrl-Z
        listens(link, now, QUIET_S - 1)
        assert not link.lost
        listens(link, now, 3)
    assert link.lost == "it said nothing for 40 s (recovery.heartbeat_s)"
    theirs.close()


def test_last_words_come_before_the_end() -> None:
    link, theirs = pair()
    say(theirs, {"a": 1})
    say(theirs, {"b": 2})
    theirs.close()
    assert until_heard(link) == [{"a": 1}, {"b": 2}]
    until_heard(link)
    assert link.lost == "its command has ended"
    link.say(too="late")


def test_what_is_no_word_ends_the_connection() -> None:
    link, theirs = pair()
    theirs.sendall(b"\xff" * 64)
    until_heard(link)
    assert link.lost.startswith("its words cannot be read")
    theirs.close()


def test_words_of_ranks_arrive_as_they_were() -> None:
    failure = Failure(3, "peer", "was lost", "why", 1.5, "run", is_gone=True)
    words: list[Word] = ["done", "moved", "alive", Heard(7), failure]
    assert [from_words(to_words(word)) for word in words] == words


def test_the_secret_is_its_owners_alone(tmp_path: Path) -> None:
    assert Where.read(tmp_path) is None
    Where(7, "secret").write(tmp_path)
    assert stat.S_IMODE((tmp_path / NODES_FILE).stat().st_mode) == 0o600
    assert Where.read(tmp_path) == Where(7, "secret")
    (tmp_path / NODES_FILE).write_text("[1]")
    assert Where.read(tmp_path) is None


def test_a_job_of_one_machine_listens_on_loopback() -> None:
    assert [bound_to(host) for host in ("127.0.0.1", "localhost")] == ["127.0.0.1"] * 2
    assert bound_to(socket.gethostname()) == "", "others may know it as another address"


def test_who_differs_is_refused(tmp_path: Path) -> None:
    """At the beginning that ends the job; later it does not, and the others are told why."""
    address = RankAddress(rank=0, world_size=2, master=("127.0.0.1", 1))
    told = list[str]()

    def come(index: int, **more: Any) -> Link:
        one = RankAddress(rank=index, world_size=2, master=("127.0.0.1", 1))
        return connected(tmp_path, one, hello(index, **more), quiet_s=0.0, timeout_s=LIMIT_S)

    def head() -> Head:
        return Head(tmp_path, address, hello(0), quiet_s=0.0, tell=told.append)

    others = list[Link]()

    def refused() -> None:
        with head() as first:
            others.append(come(1, seed=2))
            first.gather(LIMIT_S)

    with pytest.raises(ConfigError, match="seed = 2: expected 1, as on node 0"):
        refused()
    (other,) = others
    assert until_heard(other) == [{"do": "bye", "code": 2, "text": ""}]
    with head() as second:
        ours = come(1)
        second.gather(LIMIT_S)
        ours.say(**{"is": "ready"})
        second.offer("plan", {1: [1]})
        late = come(2, seed=3)
        while not told:
            assert second.look("plan") == []
        (bye,) = until_heard(late)
    assert bye["code"] == 2
    assert "seed = 3: expected 1, as on node 0" in bye["text"]
    assert "node 2 (host2) is not taken in" in told[0]
    assert until_heard(ours)[-1] == {"do": "bye", "code": 0, "text": ""}
    assert not list(tmp_path.iterdir())


def test_who_has_which_place() -> None:
    """A lost machine's ranks go to spare places; what was given up is nobody's."""
    nodes = {index: Node(hello(index)) for index in range(3)}
    there = list(nodes.values())
    head: Any = SimpleNamespace(nodes=nodes, there=there)
    none: Any = None
    fleet = Fleet(head, "", none, folder=Path(), start=none, pack=none)
    plan: Any = SimpleNamespace(world_size=3, devices=("cpu",) * 3)
    fleet.places = first_places(there, plan)
    assert fleet.places == (Place(0, 0), Place(0, 1), Place(1, 0))
    assert fleet.free() == [Place(1, 1), Place(2, 0), Place(2, 1)]
    fleet.give_up([Place(2, 0)])
    assert fleet.free() == [Place(1, 1), Place(2, 1)]
    del there[1]
    assert fleet.lacking() == [2]
    assert fleet.move_lost() == []
    assert fleet.places[2] == Place(2, 1)
    del there[1]
    assert fleet.move_lost() == [2], "there is no place"
    nodes[2] = Node(hello(2))
    there.append(nodes[2])
    assert fleet.move_lost() == []
    assert fleet.free() == [Place(2, 0)], "its command was started again"
