"""Groups that their members open alone: several epochs in a process, and nothing left of them."""

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from limits import within_some_limit
from ports import free_port
from torch.distributed import FileStore, HashStore, ProcessGroup, Store

from weft.api.engine import close_at_exit
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.errors import CommError
from weft.comm.groups import Group, Groups
from weft.comm.join import join, join_at
from weft.comm.rendezvous import Rendezvous
from weft.elastic.pool import WorkerPool
from weft.models.llama.sizes import SIZES
from weft.models.registry import FAMILIES
from weft.parallel.apply import axis_groups
from weft.parallel.params import held_pieces, param_tilings, reduction_groups
from weft.parallel.pipeline.stage_border import channels
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.plan.streams import streams

T = TypeVar("T")
CPU = torch.device("cpu")
TIMEOUT_S = 600.0
TRIES = 60
SETTLED_S = 300.0
"""A thread that was told to end may take a while on a busy machine."""


def on_ranks(world_size: int, rank_main: Callable[[int], T]) -> list[T]:
    """Ranks as threads of this process."""
    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(rank_main, range(world_size)))


def groups_of(store: Store, rank: int) -> Groups:
    return Groups(store, rank, CPU, timeout_s=TIMEOUT_S, is_local=True)


def counts() -> tuple[int, int]:
    """Threads and open files of this process."""
    threads, files = (len(list(Path("/proc/self", what).iterdir())) for what in ("task", "fd"))
    return threads, files


@contextmanager
def nothing_left() -> Iterator[None]:
    """Without help of the collector: closing is what lets go."""
    gc.collect()
    gc.disable()
    before = counts()
    try:
        yield
        deadline = time.monotonic() + SETTLED_S
        while counts() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        names = [p.read_text() for p in Path("/proc/self/task").glob("*/comm")]
        assert counts() <= before, names
    finally:
        gc.enable()


def sum_of(comm: Comm, value: float, ranks: tuple[int, ...] | None = None) -> float:
    total = torch.tensor(value)
    comm.all_reduce(total, name="sum", group=ranks)
    return total.item()


def test_ranks_with_different_histories_open_what_they_share() -> None:
    """Each list is that of one rank; what two ranks share is in the same order."""
    histories = {
        0: [(0, 1), (0, 1, 2, 3)],
        1: [(0, 1), (1, 2), (0, 1, 2, 3)],
        2: [(1, 2), (2, 3), (0, 1, 2, 3)],
        3: [(2, 3), (0, 1, 2, 3)],
    }
    store = HashStore()

    def rank_main(rank: int) -> list[float]:
        comm = Comm(rank, 4, groups=groups_of(store, rank))
        with comm:
            comm.open_groups(histories[rank])
            return [sum_of(comm, 10.0**rank, ranks) for ranks in histories[rank]]

    with nothing_left():
        found = on_ranks(4, rank_main)
    assert found == [[11, 1111], [11, 110, 1111], [110, 1100, 1111], [1100, 1111]]


def test_two_epochs_are_open_at_once(tmp_path: Path) -> None:
    """Each process has its ranks in both; one ends, the other goes on."""

    def rank_main(rank: int) -> list[float]:
        first, second = (
            join(
                RankAddress(rank=rank, world_size=2, store_file=tmp_path / name),
                backend="gloo",
                device=CPU,
                timeout_s=TIMEOUT_S,
            )
            for name in ("first", "second")
        )
        found = [sum_of(first, 1.0), sum_of(second, 10.0), sum_of(first, 2.0)]
        first.close()
        found.append(sum_of(second, 20.0))
        second.close()
        with pytest.raises(CommError, match="was closed"):
            sum_of(first, 1.0)
        return found

    with nothing_left():
        assert on_ranks(2, rank_main) == [[2.0, 20.0, 4.0, 40.0]] * 2


def opens_and_closes(address: RankAddress) -> int:
    for number in range(TRIES):
        store = FileStore(f"{address.store_file}-{number}", -1)
        groups = groups_of(store, address.rank)
        groups.open(range(address.world_size), "gloo", "calls")
        groups.close()
    return len(groups)


def test_who_closes_at_once_breaks_nobody_who_still_connects(pool: WorkerPool) -> None:
    """Whoever has connected leaves, while others still connect: a race, so it is run often.

    Without the wait in ``close`` one try in about ten fails.
    """
    assert pool.run(opens_and_closes, world_size=4) == [0] * 4


def threads_of_gloo() -> list[int]:
    """They name themselves, a moment after they began; some other thread may just end."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            if (task / "comm").read_text() == "gloo_tcp_loop\n":
                found.append(int(task.name))
    return found


def test_threads_of_gloo_take_no_processor_from_those_that_compute() -> None:
    store = HashStore()
    with nothing_left():
        groups = groups_of(store, 0)
        groups.open((0,), "gloo", "calls")
        deadline = time.monotonic() + 60
        while not (threads := threads_of_gloo()) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not threads and torch.__version__ < "2.13":
            pytest.skip("this PyTorch's thread has no name to be found by")
        assert [os.sched_getscheduler(thread) for thread in threads] == [os.SCHED_BATCH]
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
        groups.close()
        del groups


def test_a_call_that_somebody_still_holds_keeps_nothing_open() -> None:
    store, held = HashStore(), []

    def rank_main(rank: int) -> None:
        comm = Comm(rank, 2, groups=groups_of(store, rank))
        finish = comm.all_reduce(torch.ones(3), name="sum", wait=False)
        finish()
        held.extend([finish, comm, comm._group(comm.world)])
        comm.close()

    with nothing_left():
        on_ranks(2, rank_main)
        assert len(held) == 6


def test_after_a_failed_collective_nothing_is_left() -> None:
    store = HashStore()

    def rank_main(rank: int) -> str:
        comm = Comm(rank, 3, groups=groups_of(store, rank))
        comm.open_groups([(0, 1)])
        comm.barrier(name="all here")
        try:
            with comm:
                if rank == 2:
                    raise KeyError("a mistake")
                sum_of(comm, 1.0)
        except (KeyError, CommError) as error:
            return str(error)
        return "no failure"

    with nothing_left():
        *others, mistaken = on_ranks(3, rank_main)
    assert mistaken == "'a mistake'"
    for rank, message in enumerate(others):
        peers = ", ".join(str(r) for r in range(3) if r != rank)
        assert message.startswith(f"rank {rank}: sum with rank(s) {peers} failed: "), message


def test_an_abort_waits_for_no_call_that_is_stuck() -> None:
    """Rank 1 never answers rank 0, whose call ends at its limit without anybody waiting for it."""

    def attempt(limit_s: float) -> None:
        store = HashStore()

        def rank_main(rank: int) -> Groups:
            groups = Groups(store, rank, CPU, timeout_s=limit_s, is_local=True)
            groups.open((0, 1), "gloo", "calls")
            return groups

        with nothing_left():
            stuck, silent = on_ranks(2, rank_main)
            handle = stuck.open((0, 1), "gloo", "calls").handle
            call = handle.allreduce([torch.ones(1)])
            del handle
            stuck.abort()
            assert not call.is_completed(), "somebody waited for it"
            silent.abort()
            del call

    within_some_limit(attempt, 4.0)


def test_between_machines_an_abort_ends_a_call_that_is_stuck() -> None:
    """A machine that is lost says nothing, not even that it is gone. What others have stays."""
    with socket.create_server(("127.0.0.1", 0)) as server, nothing_left():
        store = HashStore()

        def rank_main(rank: int) -> Groups:
            groups = Groups(store, rank, CPU, timeout_s=TIMEOUT_S)
            groups.open((0, 1), "gloo", "calls")
            return groups

        before = socket.getdefaulttimeout()
        with socket.create_connection(server.getsockname()) as mine, server.accept()[0] as other:
            socket.setdefaulttimeout(TIMEOUT_S)
            try:
                stuck, silent = on_ranks(2, rank_main)
            finally:
                socket.setdefaulttimeout(before)
            assert all(os.get_blocking(each.fileno()) for each in (server, mine, other))
            call = stuck.open((0, 1), "gloo", "calls").handle.allreduce([torch.ones(1)])
            stuck.abort()
            with pytest.raises(RuntimeError, match="onnection"):
                call.wait()
            mine.sendall(b"!")
            assert other.recv(1) == b"!"
        silent.abort()
        del call


class Aborting:
    """Stands in for a process group."""

    def __init__(self, name: str, log: list[str], *, knows_how: bool = True) -> None:
        self._name, self._log, self._knows_how = name, log, knows_how

    def abort(self) -> None:
        self._log.append(f"abort {self._name}")
        if not self._knows_how:
            raise RuntimeError("this backend does not support abort")

    def shutdown(self) -> None:
        self._log.append(f"shutdown {self._name}")


def test_groups_of_devices_are_aborted_first_and_none_is_destroyed() -> None:
    """Those of gloo may wait for their limit; one that cannot abort holds up no other."""
    groups, log = Groups(HashStore(), 0, CPU, timeout_s=TIMEOUT_S), list[str]()
    for name in ("calls/gloo/1", "channel 0/mute/2", "calls/nccl/3", "staged calls/gloo/4"):
        handle = Aborting(name, log, knows_how="mute" not in name)
        groups._open[name] = Group((0, 1), handle, HashStore())  # type: ignore[arg-type]
    groups.abort()
    assert [line.split("/")[1] for line in log] == ["nccl", "mute", "gloo", "gloo"]
    assert all(line.startswith("abort ") for line in log)
    assert not len(groups)
    groups.abort()
    assert len(log) == 4


def test_two_threads_may_abort_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that listens to the launcher, and the one that fails meanwhile."""
    groups, log, raised = Groups(HashStore(), 0, CPU, timeout_s=TIMEOUT_S), list[str](), list[str]()
    for name in ("calls/nccl/1", "calls/nccl/2"):
        groups._open[name] = Group((0, 1), Aborting(name, log), HashStore())  # type: ignore[arg-type]
    release = Group.release

    def aborts() -> None:
        try:
            groups.abort()
        except CommError as error:
            raised.append(str(error))

    other = threading.Thread(target=aborts)

    def slowly(group: Group) -> ProcessGroup:
        handle = release(group)
        if other.ident is None:
            other.start()
            other.join(0.2)
        return handle

    monkeypatch.setattr(Group, "release", slowly)
    groups.abort()
    other.join()
    assert not raised
    assert sorted(log) == ["abort calls/nccl/1", "abort calls/nccl/2"]


def test_a_group_that_opens_while_all_are_left_is_left_too(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, log = Groups(HashStore(), 0, CPU, timeout_s=TIMEOUT_S), list[str]()

    def opened(*_: object, **__: object) -> Group:
        groups.abort()
        return Group((0, 1), Aborting("it", log), HashStore())  # type: ignore[arg-type]

    monkeypatch.setattr(groups, "_new", opened)
    with pytest.raises(CommError, match="rank 0: this epoch was ended"):
        groups.open((0, 1), "gloo", "calls")
    assert log == ["abort it"]
    assert not len(groups)


@pytest.mark.parametrize("error", [None, ValueError("a mistake of the script")])
def test_a_script_that_ends_by_an_error_leaves_its_job_at_once(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", registered.append)
    if error is not None:
        monkeypatch.setattr("sys.last_value", error, raising=False)
    else:
        monkeypatch.delattr("sys.last_value", raising=False)
    comm, closed = Comm(), list[bool]()
    monkeypatch.setattr(comm, "close", lambda *, abort: closed.append(abort))
    close_at_exit(comm)
    registered[0]()
    assert closed == [error is not None]


def test_a_member_that_does_not_come_is_waited_for_and_then_said() -> None:
    groups = Groups(HashStore(), 0, CPU, timeout_s=0.2, is_local=True)
    with nothing_left():
        with pytest.raises(CommError, match="rank 0: connecting ranks 0,2 failed: "):
            groups.open((0, 2), "gloo", "calls")
        groups.close()


@pytest.mark.parametrize("hosted", ["file", "rank 0"])
def test_epochs_follow_one_another_at_one_rendezvous(tmp_path: Path, hosted: str) -> None:
    file = tmp_path / "meet" if hosted == "file" else None
    master = "127.0.0.1", free_port()
    with Rendezvous(RankAddress(master=master), TIMEOUT_S) as first:
        first.store("any")  # PyTorch keeps a pipe open after the first one

    def rank_main(rank: int) -> list[float]:
        found = []
        address = RankAddress(rank=rank, world_size=2, store_file=file, master=master)
        with Rendezvous(address, TIMEOUT_S) as rendezvous:
            for epoch in range(5):
                with join_at(rendezvous, backend="gloo", device=CPU) as comm:
                    found.append(sum_of(comm, float(epoch)))
        return found

    with nothing_left():
        assert on_ranks(2, rank_main) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2


class Counted(Groups):
    """Opens nothing, and remembers what it was asked for."""

    def __init__(self, rank: int) -> None:
        super().__init__(HashStore(), rank, CPU, timeout_s=TIMEOUT_S)
        self.opened: list[tuple[str, tuple[int, ...]]] = []

    def open(self, ranks: Sequence[int], backend: str, purpose: str) -> Group:
        assert self.rank in ranks
        self.opened.append((purpose, tuple(ranks)))
        return Group(tuple(ranks), ProcessGroup(HashStore(), 0, 1), HashStore())


def test_a_rank_of_a_large_job_opens_its_own_groups_only() -> None:
    """128 ranks, 4 stages of dp 8 and tp 4, ZeRO 1: 32 groups of tp, 16 of dp and 4 stages (norms
    are whole in all of one), the last two once more for their gathers. All ranks are joined by a
    tree of small groups, and two stages for what they send: over gloo no group has all ranks."""
    spec = replace(SIZES["debug-1m"], num_layers=4, num_heads=4, num_kv_heads=4)
    meshes = [Mesh.of(tuple(range(32 * s, 32 * s + 32)), dp=8, tp=4) for s in range(4)]
    stages = [
        StagePlan(mesh=mesh, layers=(number, number + 1), zero=1)
        for number, mesh in enumerate(meshes)
    ]
    pipeline = PipelinePlan(stages=tuple(stages), samples=8, microbatch=8)
    plan = Plan(num_layers=4, pipelines=(pipeline,))
    specs = FAMILIES[spec.family].param_specs(spec)
    pieces = held_pieces(plan, specs, param_tilings(plan, spec))
    every = set()
    for rank in range(128):
        groups = Counted(rank)
        comm = Comm(rank, 128, groups=groups)
        comm.open_groups([*axis_groups(plan, comm.members), *reduction_groups(pieces)])
        comm.open_gathering(reduction_groups(pieces, sharded=True))
        comm.open_channels(channels(plan))
        opened = dict.fromkeys(groups.opened)  # both directions of a border share a group
        assert len(opened) == len(groups.opened) - sum(p == "messages" for p, _ in opened)
        every |= set(groups.opened)
        control = [ranks for purpose, ranks in opened if purpose == "control"]
        assert [len(ranks) for ranks in control] == [16, 8][: 2 if rank % 16 == 0 else 1]
        pairs = [ranks for purpose, ranks in opened if purpose == "messages"]
        stage = rank // 32
        assert [ranks[0] // 32 for ranks in pairs] == [s for s in (stage - 1, stage) if 0 <= s < 3]
        found = [
            (purpose, len(ranks))
            for purpose, ranks in opened
            if purpose not in ("control", "messages")
        ]
        assert sorted(found) == [
            ("calls", 4),
            ("calls", 8),
            ("calls", 32),
            ("gathers", 8),
            ("gathers", 32),
        ]
        known = streams(plan, rank)
        assert sum(known.values()) == len(found) + 3 + known["channels"], "compute, copies, all"
    assert len([ranks for purpose, ranks in every if purpose == "calls"]) == 32 + 16 + 4
    assert len([ranks for purpose, ranks in every if purpose == "gathers"]) == 16 + 4
