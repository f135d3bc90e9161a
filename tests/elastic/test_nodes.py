"""What machines of a job say to one another, without ranks."""

import gc
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from weft.cluster.cluster import HOST
from weft.comm.address import RankAddress, own_host
from weft.comm.proven import heard, say, server_at
from weft.config.errors import STOPPED, ConfigError, RunError
from weft.elastic.failure import ANEW, Failure
from weft.elastic.nodes import link as link_module
from weft.elastic.nodes import places
from weft.elastic.nodes.fleet import Fleet
from weft.elastic.nodes.head import Head
from weft.elastic.nodes.link import Link
from weft.elastic.nodes.meeting import Where, bound_to, store_at
from weft.elastic.nodes.member import Member, connected
from weft.elastic.nodes.places import Kind, Place, first_places, refuse_unsuited
from weft.elastic.nodes.plans import Arrivals
from weft.elastic.nodes.remote import Hello, Node, from_words, to_words
from weft.elastic.rank_process import Heard, Word
from weft.elastic.signals import Asked
from weft.train.run_folder import NODES_FILE

LIMIT_S = 60.0
QUIET_S = 40.0
CPU = Kind(HOST)
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
ONE, TWO = "one", "two"
"""Families of accelerators."""


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine says how many it has of them."""
    monkeypatch.setattr(places, "is_counted", lambda family: family in (ONE, TWO))


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


def with_chips(index: int, chips: dict[str, list[str]]) -> Hello:
    return replace(hello(index), chips=chips)


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
    assert bound_to("::1") == "::1"
    with pytest.MonkeyPatch.context() as patch:  # a machine may have no such address
        asked = list[Any]()
        patch.setattr(socket, "create_server", lambda *_, family, **more: asked.append(family))
        patch.setattr(socket, "has_dualstack_ipv6", lambda: False)
        server_at("::1")
        server_at("")
        assert asked == [socket.AF_INET6, socket.AF_INET]
    assert bound_to(socket.gethostname()) == "", "others may know it as another address"


def test_machines_meet_at_whatever_a_name_stands_for(tmp_path: Path) -> None:
    """In order: where nobody listens, or somebody else, the next address is tried."""
    address = RankAddress(rank=0, world_size=2, master=("127.0.0.1", 1))
    known = socket.getaddrinfo
    with (
        Head(tmp_path, address, hello(0), quiet_s=0.0, tell=print) as head,
        ThreadPoolExecutor() as pool,
        pytest.MonkeyPatch.context() as patch,
    ):
        where = Where.read(tmp_path)
        assert where is not None

        def found(host: str, port: int | None, *more: Any, **named: Any) -> Any:
            hosts = ("127.0.0.3", "127.0.0.2", "127.0.0.1") if host == "several" else (host,)
            return [each for name in hosts for each in known(name, port, *more, **named)]

        def other() -> None:
            end, _ = stranger.accept()
            end.close()

        patch.setattr(socket, "getaddrinfo", found)
        with socket.create_server(("127.0.0.2", where.port)) as stranger:
            pool.submit(other)
            mine = RankAddress(rank=1, world_size=2, master=("several", 1))
            link = connected(tmp_path, mine, hello(1), quiet_s=0.0, timeout_s=LIMIT_S)
        head.gather(LIMIT_S)
        assert own_host({**LAUNCHED, "MASTER_ADDR": "several"}) == "127.0.0.1"
        link.drop("")


def test_all_addresses_are_listened_at() -> None:
    """Of both kinds, where the machine has them."""
    store = store_at("")
    hosts = ["127.0.0.1", "::1"] if socket.has_dualstack_ipv6() else ["127.0.0.1"]
    for host in hosts:
        end = TCPStore(host, store.port, is_master=False, wait_for_workers=False)
        end.set(host, "here")
    assert [store.get(host) for host in hosts] == [b"here"] * len(hosts)
    assert own_host({**LAUNCHED, "MASTER_ADDR": hosts[-1]}) == hosts[-1]


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
        second.refuses = partial(refuse_unsuited, [Place(1, Kind(ONE, "a"), 0)] * 2)
        without = come(3)
        while len(told) < 2:
            assert second.look("plan") == []
        (last,) = until_heard(without)
    assert (last["code"], "'none': expected 2 x a" in last["text"]) == (2, True)
    assert bye["code"] == 2
    assert "seed = 3: expected 1, as on node 0" in bye["text"]
    assert "node 2 (host2) is not taken in" in told[0]
    assert until_heard(ours)[-1] == {"do": "bye", "code": 0, "text": ""}
    assert not list(tmp_path.iterdir())
    with head() as third:
        third.refuses = second.refuses
        others.append(come(1))
        third.gather(LIMIT_S)
        with pytest.raises(ConfigError, match="'none': expected 2 x a"):
            third.offer("plan", {0: [0, 1]})
    for link in (ours, late, without, *others):
        link.drop("")


def test_nobody_takes_the_number_of_a_machine_at_work(tmp_path: Path) -> None:
    """Only of one that is silent or gone, which is told so."""
    address = RankAddress(rank=0, world_size=2, master=("127.0.0.1", 1))
    told = list[str]()
    head = Head(tmp_path, address, hello(0), quiet_s=0.0, tell=told.append)

    ends = list[Link | socket.socket]()

    def come() -> tuple[Node | None, Link, socket.socket]:
        link, theirs = pair()
        ends.extend((link, theirs))
        head._came.put((hello(1), link))
        return head._take(0.0), link, theirs

    with clock() as now:
        first, link, theirs = come()
        assert first is not None
        now.s += QUIET_S / 2 + 1
        say(theirs, {"is": "ready"})
        nobody, refused, newcomer = come()
        assert nobody is None, "the first one has just spoken"
        assert refused.lost
        assert not link.lost
        assert first.is_ready
        bye = heard(newcomer)
        assert bye["code"] == 2
        assert "node 1 (host1) is at work in this job" in bye["text"]
        assert "node 1 (host1) is at work in this job" in told[0]
        now.s += QUIET_S / 2 + 1
        second, _, other = come()
        assert second is head.nodes[1] is not first
        bye = heard(theirs)
        assert bye["code"] == 1
        assert "its command was started again" in bye["text"]
        other.close()
        third, *_ = come()
        assert third is head.nodes[1] is not second
    for end in ends:
        end.drop("") if isinstance(end, Link) else end.close()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 75),
        (ConfigError("a", 1, "b"), 2),
        (RunError(), 1),
        (ValueError(), 1),
    ],
)
def test_what_all_commands_end_with(tmp_path: Path, error: BaseException, code: int) -> None:
    address = RankAddress(rank=0, world_size=1, master=("127.0.0.1", 1))
    head = Head(tmp_path, address, hello(0), quiet_s=0.0, tell=print)
    with pytest.raises(type(error)), head:
        raise error
    assert head.code == code


def test_a_machine_that_is_asked_to_stop(tmp_path: Path) -> None:
    """Without processes it leaves; otherwise they are asked, and those that start later, too."""

    def member() -> tuple[Member, socket.socket, list[str]]:
        link, head = pair()
        done = list[str]()

        def start() -> Any:
            return SimpleNamespace(
                sources=(),
                exitcode=None,
                words=lambda: (),
                terminate=lambda: done.append("asked"),
                end=lambda: done.append("ended"),
            )

        def none(*_: object) -> Any:
            return None

        address = RankAddress(rank=1, world_size=2, master=("127.0.0.1", 1))
        started = Member(link, address, start=start, accept=none, unpack=none, folder=tmp_path)
        return started, head, done

    asked = Asked()
    asked.times = 1
    spare, silent, _ = member()
    assert spare.run(asked) == STOPPED
    silent.close()
    one, head, done = member()
    say(head, {"do": "start", "id": 1})
    say(head, {"do": "start", "id": 2})
    until_has(one, 2)
    say(head, {"do": "start", "id": 3})
    say(head, {"do": "bye", "code": 0, "text": ""})
    one._is_asked = True
    assert one.run(asked) == 0
    assert done == ["asked"] + ["ended"] * 3
    head.close()


def until_has(member: Member, processes: int) -> None:
    while len(member._processes) < processes:
        member._look()


def test_machines_that_come_while_another_is_taken_in(tmp_path: Path) -> None:
    """They are taken in next, also where one has the memory of one that is gone."""
    nodes = {0: Node(hello(0))}
    for index in (1, 2):
        nodes[index] = Node(hello(index), is_late=True)
    nodes[2].is_ready = False
    there = list(nodes.values())
    free = [1, 2]
    head: Any = SimpleNamespace(
        there=there, look=lambda _: [node for node in there[1:] if node.is_ready]
    )
    fleet: Any = SimpleNamespace(head=head, free=lambda: free)
    job: Any = SimpleNamespace(
        out=tmp_path, began=0.0, plan=SimpleNamespace(to_json=str, world_size=2)
    )
    plans: Any = SimpleNamespace(is_whole=False, job=job, seats=(0, 1), with_all=lambda: "larger")
    told = list[str]()
    arrivals = Arrivals(fleet, job, plans, told.append)
    assert arrivals.wanted()
    arrivals.epoch()
    assert told == ["after step 0: the plan is now larger, for node 1 (host1) has come"]
    assert not arrivals.wanted()
    nodes[2].is_ready = True
    assert arrivals.wanted()
    arrivals.epoch()
    assert not arrivals.wanted()
    del there[1], nodes[1]
    gc.collect()
    assert len(arrivals._known) == 1


def test_who_has_which_place() -> None:
    """A lost machine's ranks go to spare places; what was given up is nobody's."""
    nodes = {index: Node(hello(index)) for index in range(3)}
    there = list(nodes.values())
    head: Any = SimpleNamespace(nodes=nodes, there=there)
    none: Any = None
    process: Any = SimpleNamespace()
    store: Any = SimpleNamespace(port=lambda: 1)
    fleet = Fleet(head, "", store, folder=Path(), start=none, pack=none)
    plan: Any = SimpleNamespace(world_size=3, devices=("cpu",) * 3)
    fleet.places = first_places(there, plan)
    assert fleet.places == (Place(0, CPU, 0), Place(0, CPU, 1), Place(1, CPU, 0))
    assert fleet.free() == [1, 2, 2]
    del there[1]
    assert fleet.lacking() == [2]
    assert fleet.move_lost() == []
    assert fleet.places[2] == Place(2, CPU, 0)
    fleet.settle("1", [process] * 3)
    fleet.give_up([2])
    fleet.places = fleet.places[:2]
    assert fleet.free() == [2]
    fleet.places += (Place(2, CPU, 1),)
    fleet.settle("2", [process] * 3)
    del there[1]
    assert fleet.move_lost() == [2], "there is no place"
    nodes[2] = Node(hello(2))
    there.append(nodes[2])
    fleet.give_up([2])
    assert fleet.move_lost() == []
    assert fleet.free() == [2], "its command was started again"
    fleet.places = fleet.places[:2]
    assert fleet.free() == [2, 2], "what was lost there was another's"


def test_devices_of_two_families_have_the_same_numbers() -> None:
    """No rank gets the other family's device, or one that a machine does not have."""
    some, more = {ONE: ["a"], TWO: ["b"]}, {ONE: ["a", "z", "a"], TWO: ["z"]}
    nodes = {i: Node(with_chips(i, has)) for i, has in enumerate((more, some, some, more))}
    there = list(nodes.values())
    head: Any = SimpleNamespace(nodes=nodes, there=there)
    none: Any = None
    process: Any = SimpleNamespace()
    store: Any = SimpleNamespace(port=lambda: 1)
    fleet = Fleet(head, "", store, folder=Path(), start=none, pack=none)
    plan: Any = SimpleNamespace(world_size=4, devices=(ONE, ONE, ONE, TWO))
    with pytest.raises(ConfigError) as lacks:
        first_places(there[1:], plan)
    said = "accelerators = '1 x a and 1 x b': expected 2 x "
    assert str(lacks.value).startswith(f"{said}{ONE}, which node 1 (host1) needs for its 2 ranks")
    fleet.places = first_places(there, plan)
    a, b, z = Kind(ONE, "a"), Kind(TWO, "b"), Kind(ONE, "z")
    before = (Place(0, a, 0), Place(0, z, 1), Place(1, a, 0), Place(1, b, 0))
    assert fleet.places == before
    del there[1]
    assert fleet.move_lost() == []
    assert fleet.places[2:] == (Place(2, a, 0), Place(2, b, 0))
    fleet.settle("1", [process] * 4)
    fleet.give_up([2])
    nodes[2] = again = Node(with_chips(2, {ONE: ["a"], TWO: []}))
    there[1:] = [again]
    assert fleet.lacking() == [3], "it came back without"
    there[1:] = [nodes[3]]
    assert fleet.move_lost() == [3], "its like is nowhere"
    assert fleet.places[2] == Place(3, a, 0)
    fleet.settle("2", [process] * 4)
    fleet.give_up([2])
    nodes[1] = Node(with_chips(1, some))
    there[1:1] = [nodes[1]]
    assert fleet.move_lost() == []
    assert fleet.places[2:] == (Place(3, a, 0), before[3])
    kinds = [(place.kind.family, place.kind.chip) for place in before]
    seats = [(0, 0), (0, 1), (3, ANEW), (1, 3)]
    assert fleet.arranged(seats, kinds) == (*before[:2], Place(3, a, 2), before[3])
    assert fleet.arranged(seats[::-1], kinds) is None
    turned = fleet.arranged([(0, 1), (0, 0)], [(ONE, "a"), (ONE, None)])
    assert turned == (Place(0, a, 2), Place(0, a, 0)), "a process stays where it can"


def test_a_machine_without_its_accelerators_is_refused() -> None:
    """One sentence says what it has, and what is needed."""
    three = [Place(0, Kind(ONE, "a"), card) for card in range(3)]
    refuse_unsuited(three, with_chips(1, {ONE: ["a"] * 2}))
    refuse_unsuited([Place(0, CPU, 0)] * 2, hello(1))
    refuse_unsuited([*three[:1], Place(0, CPU, 0)], with_chips(1, {ONE: ["a"]}))
    its = Place(1, Kind(TWO, "b"), 0)
    refuse_unsuited([*three, its], with_chips(1, {TWO: ["b"]}))  # it came back: it had one rank
    for chips, has in (({}, "none"), ({ONE: ["a"]}, "1 x a"), ({ONE: ["z"] * 2}, "2 x z")):
        with pytest.raises(ConfigError) as refused:
            refuse_unsuited(three, with_chips(1, chips))
        said = "expected 2 x a, which node 1 (host1) needs for its 2 ranks."
        assert str(refused.value) == f"accelerators = '{has}': {said}"
    with pytest.raises(ConfigError, match=f"'1 x b': expected 3 x a and 1 x {CPU}"):
        refuse_unsuited([*three, Place(0, CPU, 0)], with_chips(1, {TWO: ["b"]}))
