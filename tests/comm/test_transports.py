"""Native or through host memory: the choice as data, and the same bits either way."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, ProcessGroupGloo, Store

from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.comm.members import WAYS, Channel, Choice, Member, choose, farthest, in_words
from weft.comm.transport import DirectGroup, HostCopies, NativeGroup, StagedGroup
from weft.elastic.pool import WorkerPool
from weft.platform.base import PointToPoint
from weft.platform.registry import PLATFORMS
from weft.platform.vendor import TorchBuild

CPU = Member(node="a")
CUDA = Member(family="cuda", backend="nccl", point_to_point="ordered", node="a", chip="cuda:0")
OTHER = Member(family="npu", backend="none", node="a", chip="npu:0")
GREEN, RED, OLD = (
    replace(CUDA, build=name) for name in ("nccl 2 of NVIDIA", "nccl 2 of AMD", "nccl 1 of NVIDIA")
)
MUTE = Member(family="npu", backend="hccl", point_to_point="none", node="a", chip="npu:0")

CHOICES = [
    ([CPU, CPU], "gloo"),
    ([CUDA, CUDA], "nccl"),
    ([CUDA, CPU], "gloo through host memory, because cpu and cuda share no backend"),
    ([CUDA, OTHER], "gloo through host memory, because cuda and npu share no backend"),
    ([OTHER, OTHER], "gloo through host memory, because npu has no backend"),
    ([Member(family="npu", backend="nccl"), CUDA], "nccl"),
    ([GREEN, replace(GREEN, node="b")], "nccl"),
    (
        [GREEN, RED],
        "gloo through host memory, because nccl 2 of AMD and nccl 2 of NVIDIA share no backend",
    ),
    (
        [OLD, GREEN, OLD],
        "gloo through host memory, because nccl 1 of NVIDIA and nccl 2 of NVIDIA share no backend",
    ),
    ([RED, CPU], "gloo through host memory, because cpu and cuda share no backend"),
]


@pytest.mark.parametrize(("members", "words"), CHOICES, ids=lambda value: str(value)[:40])
def test_a_group_talks_through_what_all_its_ranks_have(members: list[Member], words: str) -> None:
    assert str(choose(members)) == words


BUILDS = [
    (TorchBuild("2.13.0+cu130", {"cuda": "13.0"}), "nccl 2 of NVIDIA"),
    (TorchBuild("2.13.0+rocm6.4", {"hip": "6.4.43482"}), "nccl 2 of AMD"),
    (TorchBuild("2.10.0+metax3.8.2.2", {"cuda": "11.6"}), "nccl 2 of MetaX"),
]


@pytest.mark.parametrize(("torch_build", "build"), BUILDS, ids=[build for _, build in BUILDS])
def test_builds_for_different_vendors_are_different_libraries(
    torch_build: TorchBuild, build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them say cuda and nccl."""
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 5))
    said = {"cuDriverGetVersion": 12080}
    monkeypatch.setattr("weft.platform.cuda._said", lambda _, call: said.get(call, 0))
    monkeypatch.setattr("weft.platform.cuda.installed_torch", lambda: torch_build)
    assert PLATFORMS["cuda"].build() == build
    assert PLATFORMS["cuda"].versions() == {"nccl": "2.27.5", "driver": "12.8"}


def test_drivers_of_amd_count_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.hip", "6.4.43482")
    said = {"hipDriverGetVersion": 60443482, "ncclGetVersion": 22203}
    monkeypatch.setattr("weft.platform.cuda._said", lambda _, call: said[call])
    assert PLATFORMS["cuda"].versions() == {"nccl": "2.22.3", "driver": "6.4"}


def test_a_channel_talks_as_its_library_sends_from_rank_to_rank() -> None:
    assert choose([CUDA, CUDA], sends=True) == Choice("nccl", "ordered")
    assert choose([CPU, CPU], sends=True) == Choice("gloo", "tagged")
    assert str(choose([MUTE, MUTE])) == "hccl"
    why = "hccl sends nothing from rank to rank"
    assert str(choose([MUTE, MUTE], sends=True)) == f"gloo through host memory, because {why}"


def summed(address: RankAddress, libraries: list[str]) -> tuple[list[float], list[str]]:
    """Ranks whose backend is a name that PyTorch does not know: whoever opens it fails."""
    own = libraries[address.rank]
    device = torch.device("cpu")
    with join(address, backend="strange", device=device, build=own, timeout_s=60) as comm:
        values = torch.full((3,), 1.0 + address.rank)
        comm.all_reduce(values, name="values")
        return values.tolist(), comm.transports()


def test_ranks_of_two_vendors_sum_through_host_memory(pool: WorkerPool) -> None:
    how = "gloo through host memory, because nccl 2 of AMD and nccl 2 of NVIDIA share no backend"
    libraries = ["nccl 2 of NVIDIA", "nccl 2 of AMD"]
    expected = ([3.0] * 3, [f"ranks 0,1: {how}"])
    assert pool.run(summed, libraries, world_size=2) == [expected] * 2


def test_how_far_a_call_goes() -> None:
    far = Member(node="b")
    second = Member(family="cuda", backend="nccl", node="a", chip="cuda:1")
    assert farthest([CUDA, CUDA]) == "chip"
    assert farthest([CUDA, second]) == "node"
    assert farthest([GREEN, RED]) == "node", "the first card of each of two vendors"
    assert farthest([CPU, CPU]) == "node", "processes on the cores of a machine are not one chip"
    assert farthest([CPU, CPU, far]) == "across"


def test_ranks_in_words() -> None:
    assert in_words((0, 1, 2)) == "ranks 0-2"
    assert in_words((1, 2)) == "ranks 1,2"
    assert in_words((0, 2, 3)) == "ranks 0,2,3"


def numbers(rank: int, count: int) -> Tensor:
    """Values whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator) * 10.0 ** (3 * rank)


def collectives(comm: Comm, group: tuple[int, ...]) -> dict[str, list[Tensor]]:
    """Every collective of ``Comm``, two of each in flight where it does not wait."""
    rank, size = comm.rank, len(group)
    found: dict[str, list[Tensor]] = {}
    sums = [numbers(rank, 7), numbers(rank, 3)]
    finishes = [comm.all_reduce(t, name="sum", group=group, wait=False) for t in sums]
    for finish in reversed(finishes):
        finish()
    found["all_reduce"] = sums
    world = numbers(rank, 5)
    comm.all_reduce(world, name="world")
    largest = numbers(rank, 5)
    comm.all_reduce(largest, name="largest", group=group, largest=True)
    found["world, largest"] = [world, largest]
    whole = numbers(rank, 4 * size)
    own, again = torch.empty(4), torch.empty(4)
    finishes = [comm.reduce_scatter(whole, to, name="scatter", group=group) for to in (own, again)]
    for finish in finishes:
        finish()
    found["reduce_scatter"] = [own, again]
    place = sorted(group).index(rank)
    flat = torch.zeros(4 * size)
    flat[4 * place : 4 * place + 4] = own
    comm.all_gather(flat, name="gather", group=group)()
    found["all_gather"] = [flat]
    unlike = [3 * n for n in range(size)]  # the first has nothing
    whole, own = numbers(rank, sum(unlike)), torch.empty(unlike[place])
    comm.reduce_scatter(whole, own, name="scatter", group=group, sizes=unlike)()
    flat = torch.zeros(sum(unlike))
    torch.split(flat, unlike)[place].copy_(own)
    comm.all_gather(flat, name="gather", group=group, sizes=unlike)()
    found["unequal segments"] = [own, flat]
    copied = numbers(rank, 3)
    comm.broadcast(copied, src=group[-1], name="copy", group=group)
    found["broadcast"] = [copied]
    parts = [numbers(rank, i + 1) for i in range(size)]
    mine = group.index(rank)
    for kind, lengths in (("equal", [2] * size), ("unequal", range(size))):
        part = numbers(rank, lengths[mine])
        sizes = [(length,) for length in lengths]
        arriving = comm.gather_parts(part, sizes, name="gather parts", group=group)
        found[f"gather_parts, {kind}"] = arriving()
        terms = [numbers(rank, 3 * length).view(3, length) for length in lengths]
        summed = comm.reduce_scatter_parts(terms, name="sum parts", group=group)
        found[f"reduce_scatter_parts, {kind}"] = [summed()]
    arriving = comm.exchange(parts, [(mine + 1,)] * size, name="exchange", group=group)
    found["exchange"] = arriving()
    found["received"] = ring(comm, group)
    return found


def ring(comm: Comm, group: tuple[int, ...]) -> list[Tensor]:
    """Two messages to the next rank and one to the one before, received in order, ahead."""
    mine = group.index(comm.rank)
    onward, back = (group[(mine + d) % len(group)] for d in (1, -1))
    ways = [Channel(tuple(sorted(group)), number) for number in (4, 5)]
    rooms = [torch.empty(6) for _ in range(3)]
    arrivals = [
        comm.receive([(back, rooms[0])], channel=ways[0], name="onward"),
        comm.receive([(back, rooms[1])], channel=ways[0], name="onward"),
        comm.receive([(onward, rooms[2])], channel=ways[1], name="back"),
    ]
    values = numbers(comm.rank, 18).view(3, 6)
    sends = [
        comm.send([(back, values[2])], channel=ways[1], name="back"),
        comm.send([(onward, values[0])], channel=ways[0], name="onward"),
        comm.send([(onward, values[1])], channel=ways[0], name="onward"),
    ]
    for finish in [*arrivals, *sends]:
        finish()
    return rooms


def run(
    address: RankAddress, backends: tuple[str, ...], group: tuple[int, ...]
) -> tuple[dict[str, list[list[float]]], list[str], str]:
    comm = join(address, backend=backends[address.rank], device=torch.device("cpu"), timeout_s=600)
    comm.open_groups([group])
    comm.open_gathering([group])
    comm.open_channels([Channel(tuple(sorted(group)), number) for number in (4, 5)])
    found = collectives(comm, group) if address.rank in group else {}
    if address.rank not in group:
        comm.all_reduce(numbers(address.rank, 5), name="world")
    assert comm.gather_json(address.rank, name="ranks") == [0, 1, 2]
    comm.barrier(name="end")
    kind = type(comm._group(group)).__name__ if address.rank in group else ""
    comm.close()
    values = {name: [t.tolist() for t in tensors] for name, tensors in found.items()}
    return values, comm.transports(), kind


@pytest.mark.parametrize("group", [(0, 1, 2), (0, 2)], ids=str)
def test_through_host_memory_every_collective_gives_the_same_bits(
    group: tuple[int, ...], pool: WorkerPool
) -> None:
    native = pool.run(run, ("gloo",) * 3, group, world_size=3)
    staged = pool.run(run, ("gloo", "gloo", "none"), group, world_size=3)
    assert [kind for _, _, kind in native] == _among(group, NativeGroup.__name__)
    assert [kind for _, _, kind in staged] == _among(group, StagedGroup.__name__)
    for (expected, _, _), (found, _, _) in zip(native, staged, strict=True):
        assert found == expected
    assert len(native[0][0]) == 12, "a collective is not compared"
    why = "because gloo and none share no backend"
    groups = sorted({(0, 1, 2), group})
    words = ", ".join(map(in_words, groups))
    assert staged[0][1] == [f"{words}: gloo through host memory, {why}"]


def many(address: RankAddress, group: tuple[int, ...]) -> tuple[list[list[float]], int]:
    """Results of calls of many sizes, one at a time, and how often host memory was made."""
    comm = join(address, backend="none", device=torch.device("cpu"), timeout_s=600)
    comm.open_groups([group])
    found = []
    for size in range(33, 65):
        total, part = numbers(address.rank, size), numbers(address.rank, size)
        comm.all_reduce(total, name="sum", group=group)
        came = comm.gather_parts(part, [(size,)] * len(group), name="parts", group=group)()
        found += [total.tolist(), torch.cat(came).tolist()]
    assert comm._host_copies is not None
    made = comm._host_copies.calls.made
    comm.close()
    return found, made


def test_host_memory_of_collectives_is_used_again(pool: WorkerPool) -> None:
    """33 to 64 numbers take 256 bytes, all parts of them 512; the library may be late to let go."""
    expected = []
    for size in range(33, 65):
        both = [numbers(rank, size) for rank in range(2)]
        expected += [(both[0] + both[1]).tolist(), torch.cat(both).tolist()]
    for found, made in pool.run(many, (0, 1), world_size=2):
        assert found == expected
        assert 2 <= made <= 12, f"{made} of 96"


def test_a_copy_that_is_late_holds_up_no_caller() -> None:
    """The call is begun by a thread once its copy is on the host; two keep their order."""
    copies = HostCopies(torch.device("cpu"))
    arrived, begun = Event(), []

    def late() -> None:
        assert arrived.wait(600)

    def begin(name: str) -> Callable[[], Any]:
        def call() -> Callable[[], None]:
            begun.append(name)
            return lambda: begun.append(f"{name} ended")

        return call

    first = copies.when(late, begin("first"))
    second = copies.when(lambda: None, begin("second"))
    assert begun == []
    arrived.set()
    second()
    first()
    assert begun == ["first", "second", "second ended", "first ended"]
    copies.close(wait=True)


def _among(group: tuple[int, ...], kind: str) -> list[str]:
    """By rank; ranks outside the group have not opened it."""
    return [kind if rank in group else "" for rank in range(3)]


def foreign(store: Store, number: int, size: int, timeout: timedelta) -> Backend:
    """A library of collectives that PyTorch learns of at run time; gloo under another name."""
    return ProcessGroupGloo(store, number, size, timeout)


def direct(
    address: RankAddress, point_to_point: PointToPoint
) -> tuple[dict[str, list[list[float]]], str]:
    """Every collective over a backend from PyTorch's registry, which has its own collectives."""
    if "FOREIGN" not in dist.Backend._plugins:
        dist.Backend.register_backend("foreign", foreign, devices=["cpu"])
    comm = join(
        address,
        backend="foreign",
        device=torch.device("cpu"),
        point_to_point=point_to_point,
        timeout_s=600,
    )
    comm.open_groups([])
    comm.open_gathering([comm.world])
    ways = [Channel(comm.world, number) for number in (4, 5, 6)]
    comm.open_channels(ways, {ways[0]: {(0, 1), (1, 2), (2, 0)}, ways[2]: {(0, 2)}})
    found = collectives(comm, comm.world)
    if comm.rank == 0:
        comm.send([(2, numbers(0, 4))], channel=ways[2], name="past 1")()
    elif comm.rank == 2:
        past = torch.empty(4)
        comm.receive([(0, past)], channel=ways[2], name="past 1")()
        assert torch.equal(past, numbers(0, 4))
    assert comm.groups is not None
    opened = {n.split("/")[0]: group.ranks for n, group in comm.groups._open.items()}
    if point_to_point == "ordered":
        assert opened["channel 4"] == opened["channel 5"] == comm.world
        assert opened.get("channel 6") == (None if comm.rank == 1 else (0, 2))
    else:
        assert not any(name.startswith("channel") for name in opened)
    kind = type(comm._group(comm.world)).__name__
    comm.close()
    return {name: [t.tolist() for t in tensors] for name, tensors in found.items()}, kind


@pytest.mark.parametrize("point_to_point", WAYS)
def test_a_library_of_pytorchs_registry(point_to_point: PointToPoint, pool: WorkerPool) -> None:
    """Its sums may be added in another order; all else is the same to the bit."""
    native = pool.run(run, ("gloo",) * 3, (0, 1, 2), world_size=3)
    theirs = pool.run(direct, point_to_point, world_size=3)
    for (expected, _, _), (found, kind) in zip(native, theirs, strict=True):
        assert kind == DirectGroup.__name__
        assert found.keys() == expected.keys()
        for name, values in found.items():
            same = name.startswith(("broadcast", "exchange", "received", "gather_parts"))
            for mine, other in zip(values, expected[name], strict=True):
                assert mine == other if same else np.allclose(mine, other, rtol=1e-3), name
