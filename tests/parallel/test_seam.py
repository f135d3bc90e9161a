"""What crosses a border between stages: both ends agree on it, and nothing is kept for longer."""

from collections.abc import Callable

import torch
from torch import Tensor

from weft.parallel.pipeline.seam import Seam
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, StagePlan

SHAPE = (16, 2)


class Wire:
    """Stands in for ``Comm`` on one rank: notes what would travel, and what was not waited for."""

    device = torch.device("cpu")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sent: list[tuple[int, int, int]] = []
        self.received: list[tuple[int, int, int]] = []
        self.waiting: set[tuple[int, int]] = set()

    def send(self, _: Tensor, *, dst: int, tag: int, name: str) -> Callable[[], None]:
        assert name == "activations"
        self.sent.append((self.rank, dst, tag))
        self.waiting.add((dst, tag))
        return lambda: self.waiting.remove((dst, tag))

    def receive(self, _: Tensor, *, src: int, tag: int, name: str) -> Callable[[], None]:
        assert name == "activations"
        self.received.append((src, self.rank, tag))
        return lambda: None


def pipeline_of(*meshes: Mesh, samples: int, microbatch: int) -> PipelinePlan:
    stages = tuple(StagePlan(mesh=mesh, layers=(0, 0)) for mesh in meshes)
    return PipelinePlan(stages=stages, samples=samples, microbatch=microbatch)


def test_both_ends_of_a_wide_border_agree_on_tags_that_occur_once() -> None:
    wide, other = Mesh.of(range(16), dp=8, tp=2), Mesh.of(range(16, 28), dp=3, tp=4)
    pipeline = pipeline_of(wide, other, samples=15, microbatch=11)
    sent, received = [], []
    for rank in range(28):
        wire = Wire(rank)
        seam = Seam(wire, pipeline, 0, SHAPE)  # type: ignore[arg-type]
        for microbatch in range(2):
            part = len(pipeline.split(int(rank >= 16), microbatch)[rank])
            tensor = torch.zeros(part, SHAPE[0] // (2 if rank < 16 else 4), SHAPE[1])
            if rank < 16:
                seam.send_forward(microbatch, tensor)
                seam.receive_backward(microbatch)
            else:
                seam.receive_forward(microbatch)
                seam.send_backward(microbatch, tensor)
        sent += wire.sent
        received += wire.received
    assert len(sent) > 64, "too few moves to tell"
    assert len(set(sent)) == len(sent)
    assert sorted(sent) == sorted(received)


def test_an_output_is_let_go_when_its_gradient_has_come() -> None:
    pipeline = pipeline_of(Mesh.of((0,), dp=1), Mesh.of((1,), dp=1), samples=3, microbatch=1)
    wire = Wire(0)
    seam = Seam(wire, pipeline, 0, SHAPE)  # type: ignore[arg-type]
    seam.send_forward(0, torch.zeros(1, *SHAPE))
    seam.send_forward(1, torch.zeros(1, *SHAPE))
    assert len(wire.waiting) == 2
    seam.receive_backward(0)
    assert len(wire.waiting) == 1
    seam.finish()
    assert not wire.waiting
