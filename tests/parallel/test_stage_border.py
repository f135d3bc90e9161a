"""What crosses a border between stages: both ends agree on its order, and nothing is left."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from weft.axes.registry import AXES
from weft.comm.members import Channel, joined
from weft.parallel.pipeline.stage_border import (
    StageBorder,
    activation_tiling,
    channel,
    channels,
    edges,
)
from weft.plan.box import Box
from weft.plan.layout import Border, BorderTensor, Dim
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan

Wiring = tuple[int, int, int]
"""Sender, receiver, number of the channel."""


class Wires:
    """Carries what the stand-ins of all ranks send, in order and without names."""

    def __init__(self) -> None:
        self.travelling: dict[Wiring, list[Tensor]] = defaultdict(list)
        self.waiting = 0

    def rank(self, rank: int) -> "Wire":
        return Wire(self, rank)


class Wire:
    """Stands in for ``Comm`` on one rank."""

    device = torch.device("cpu")

    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires = wires
        self.rank = rank

    def send(
        self, parts: Sequence[tuple[int, Tensor]], *, channel: Channel, name: str
    ) -> Callable[[], None]:
        for dst, part in parts:
            assert {self.rank, dst} <= set(channel.ranks)
            self.wires.travelling[self.rank, dst, channel.number].append(part)
        self.wires.waiting += 1

        def finish() -> None:
            self.wires.waiting -= 1

        return finish

    def receive(
        self, parts: Sequence[tuple[int, Tensor]], *, channel: Channel, name: str
    ) -> Callable[[], None]:
        for src, part in parts:
            part.copy_(self.wires.travelling[src, self.rank, channel.number].pop(0))
        return lambda: None


def pipeline_of(*meshes: Mesh, samples: int, microbatch: int) -> PipelinePlan:
    stages = tuple(
        StagePlan(mesh=mesh, layers=(0, 0), device="cpu", precision="fp64") for mesh in meshes
    )
    return PipelinePlan(stages=stages, samples=samples, microbatch=microbatch)


def dims_of(shape: tuple[int, ...]) -> tuple[Dim, ...]:
    names = ("seq", *(f"dim {n}" for n in range(1, len(shape))))
    return tuple(Dim(name=name, size=size) for name, size in zip(names, shape, strict=True))


def border(shape: tuple[int, ...]) -> Border:
    return {"x": BorderTensor(dims_of(shape))}


@pytest.mark.parametrize("shape", [(16,), (16, 2), (16, 2, 3)], ids=str)
def test_what_leaves_a_wide_border_arrives_in_its_place(shape: tuple[int, ...]) -> None:
    wide, other = Mesh.of(range(16), dp=8, tp=2), Mesh.of(range(16, 28), dp=3, tp=4)
    pipeline = pipeline_of(wide, other, samples=15, microbatch=11)
    wires = Wires()
    ends = {rank: StageBorder(wires.rank(rank), pipeline, 0, border(shape)) for rank in range(28)}  # type: ignore[arg-type]
    for way, (src, dst) in (("F", (wide, other)), ("B", (other, wide))):
        wholes = []
        for microbatch, size in enumerate((11, 4)):
            whole = torch.rand(size, *shape, dtype=torch.float64)
            wholes.append(whole)
            tilings = [
                activation_tiling(pipeline, s, microbatch, dims_of(shape)).boxes for s in (0, 1)
            ]
            given, taken = tilings if way == "F" else reversed(tilings)
            for rank in src.ranks:
                ends[rank].send(way, microbatch, {"x": whole[given[rank][0].slices()]})  # type: ignore[arg-type]
        for microbatch, whole in enumerate(wholes):
            taken = activation_tiling(pipeline, int(way == "F"), microbatch, dims_of(shape)).boxes
            for rank in dst.ranks:
                ends[rank].expect(way, microbatch)  # type: ignore[arg-type]
                received = ends[rank].receive(way, microbatch)  # type: ignore[arg-type]
                assert torch.equal(received["x"], whole[taken[rank][0].slices()])
    assert not any(wires.travelling.values())
    for end in ends.values():
        end.finish()
    assert not wires.waiting


def test_only_the_dimension_after_the_batch_is_cut() -> None:
    pipeline = pipeline_of(Mesh.of((0, 1), tp=2), Mesh.of((2,), dp=1), samples=2, microbatch=2)
    boxes = activation_tiling(pipeline, 0, 0, dims_of((5, 3, 4))).boxes
    assert boxes == {0: (Box((0, 0, 0, 0), (2, 3, 3, 4)),), 1: (Box((0, 3, 0, 0), (2, 2, 3, 4)),)}


def test_stages_of_one_rank_pass_tensors_by_hand() -> None:
    mesh = Mesh.of((0,), dp=1)
    wires = Wires()
    end = StageBorder(
        wires.rank(0), pipeline_of(mesh, mesh, samples=2, microbatch=2), 0, border((3,))
    )  # type: ignore[arg-type]
    output = torch.ones(2, 3, dtype=torch.float64)
    end.send("F", 0, {"x": output})
    end.expect("F", 0)
    assert torch.equal(end.receive("F", 0)["x"], output)
    end.finish()
    assert not wires.travelling


def test_every_way_over_every_border_is_a_channel_of_its_own() -> None:
    first, second = Mesh.of((0, 1), dp=2), Mesh.of((2,), dp=1)
    vee = pipeline_of(first, second, second, first, samples=2, microbatch=1)
    alone = pipeline_of(Mesh.of((3,), dp=1), samples=2, microbatch=1)
    opened = list(channels(Plan(num_layers=0, pipelines=(vee, alone))))
    assert opened == [channel(vee, s, way) for s in (0, 2) for way in "FB"]  # type: ignore[arg-type]
    assert [each.ranks for each in opened] == [(0, 1, 2)] * 4
    assert len({each.number for each in opened}) == 4


def test_who_sends_to_whom() -> None:
    """Along the moves, whatever the size of a micro-batch; along all that may be, if unknown."""
    narrow, wide = Mesh.of((0, 1), dp=2), Mesh.of((2, 3), dp=2)
    pipeline = pipeline_of(narrow, wide, samples=5, microbatch=2)
    forward, backward = (channel(pipeline, 0, way) for way in ("F", "B"))  # type: ignore[arg-type]
    pairs = frozenset({(0, 2), (1, 3)})
    back = frozenset({(2, 0), (3, 1)})
    assert edges(pipeline, {0: border((3,))}) == {forward: pairs, backward: back}
    assert edges(pipeline, {}) == {forward: pairs, backward: back}
    without = {"ids": BorderTensor(dims_of((3,)), role="int64")}
    assert edges(pipeline, {0: without}) == {forward: pairs, backward: frozenset()}
    assert joined(1, pairs) == (1, 3)
    assert joined(1, {(0, 2), (1, 2)}) == (0, 1, 2)
    assert joined(1, ()) == (1,)

    uneven = pipeline_of(Mesh.of((0, 1), dp=2), Mesh.of((2, 3, 4), dp=3), samples=4, microbatch=3)
    (found, _) = edges(uneven, {0: border((3,))}).values()
    assert found == {(0, 2), (0, 3), (1, 4), (1, 3)}, "of two samples the second is rank 1's"
    whole = pipeline_of(Mesh.of((0, 1), tp=2), Mesh.of((2, 3), tp=2), samples=2, microbatch=2)
    assert set(edges(whole, {0: border((4,))}).values()) == {pairs, back}
    assert len(edges(whole, {})[channel(whole, 0, "F")]) == 4


def test_what_was_sent_is_let_go_once() -> None:
    pipeline = pipeline_of(Mesh.of((0,), dp=1), Mesh.of((1,), dp=1), samples=3, microbatch=1)
    wires = Wires()
    end = StageBorder(wires.rank(0), pipeline, 0, border((3,)))  # type: ignore[arg-type]
    for microbatch in range(2):
        end.send("F", microbatch, {"x": torch.zeros(1, 3, dtype=torch.float64)})
    assert wires.waiting == 2
    end.release("F", 0)
    end.release("F", 0)
    assert wires.waiting == 1
    end.finish()
    assert not wires.waiting


def test_what_no_rank_sends_back_is_no_memory_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an axis that leaves tokens whole, one rank sends them and alone gets their gradients."""
    monkeypatch.setattr(type(AXES["tp"]), "divides", lambda *_: False)
    one, other = Mesh.of(range(2), tp=2), Mesh.of((2,))
    pipeline = pipeline_of(one, other, samples=4, microbatch=4)
    end = StageBorder(Wires().rank(0), pipeline, 0, border((8, 2)))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="rank 0 B: 0 of 64 elements arrive"):
        end.expect("B", 0)
