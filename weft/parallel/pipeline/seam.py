"""What travels between two neighbouring stages: the moves between their activation tilings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm.comm import Comm, Finish
from weft.parallel.tensor.split import part_of
from weft.plan.box import Box
from weft.plan.plan import PipelinePlan
from weft.plan.tiling import Move, Tiling, moves
from weft.precision.dtypes import MODEL_DTYPE

MAX_MOVES = 64
"""Between two ranks for one microbatch, a part of a tensor each: mostly one, a handful at most."""


def activation_tiling(
    pipeline: PipelinePlan, stage: int, microbatch: int, shape: tuple[int, ...]
) -> Tiling:
    """Where a stage's input or output of one microbatch lies, ``[batch, *shape]``.

    Data-parallel ranks hold parts of the batch, tensor-parallel ranks parts of the dimension
    after it, which is the sequence of a decoder.
    """
    size = min(pipeline.microbatch, pipeline.samples - microbatch * pipeline.microbatch)
    mesh = pipeline.stages[stage].mesh
    tp = mesh.size("tp")
    boxes = {}
    for rank, batch in pipeline.split(stage, microbatch).items():
        parts = [batch, *(range(length) for length in shape)]
        if tp > 1:
            parts[1] = part_of(shape[0], tp, mesh.coordinate(rank)["tp"])
        boxes[rank] = Box(tuple(p.start for p in parts), tuple(len(p) for p in parts))
    return Tiling((size, *shape), boxes)


class Seam:
    """The border between stages ``stage`` and ``stage + 1`` of one pipeline, on one rank.

    Activations go forward along the moves from one tiling to the other, their gradients back
    along the same moves. Stages on one rank pass tensors by hand: such moves send nothing.
    """

    def __init__(
        self, comm: Comm, pipeline: PipelinePlan, stage: int, shape: tuple[int, ...]
    ) -> None:
        self._comm = comm
        self._pipeline = pipeline
        self._stage = stage
        self._shape = shape
        self._dtype = MODEL_DTYPE[pipeline.stages[stage].precision]
        self._sent: dict[tuple[str, int], list[tuple[Finish, Tensor]]] = {}
        self._kept: dict[tuple[str, int, Box], Tensor] = {}

    def send_forward(self, microbatch: int, output: Tensor) -> None:
        """Hand on this rank's part of the output of ``stage``."""
        source, target = self._tilings(microbatch)
        self._send("F", microbatch, output, source.boxes[self._comm.rank], moves(source, target))

    def receive_forward(self, microbatch: int) -> Tensor:
        """This rank's part of the input of ``stage + 1``."""
        source, target = self._tilings(microbatch)
        return self._receive("F", microbatch, target.boxes[self._comm.rank], moves(source, target))

    def send_backward(self, microbatch: int, grad: Tensor) -> None:
        """Hand back the gradient of this rank's part of the input of ``stage + 1``."""
        source, target = self._tilings(microbatch)
        back = [Move(dst, src, box) for src, dst, box in moves(source, target)]
        self._send("B", microbatch, grad, target.boxes[self._comm.rank], back)

    def receive_backward(self, microbatch: int) -> Tensor:
        """The gradient of this rank's part of the output of ``stage``."""
        source, target = self._tilings(microbatch)
        back = [Move(dst, src, box) for src, dst, box in moves(source, target)]
        grad = self._receive("B", microbatch, source.boxes[self._comm.rank], back)
        # The gradient came, so the output had arrived: let go of it.
        self._finish("F", microbatch)
        return grad

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for way, microbatch in list(self._sent):
            self._finish(way, microbatch)

    def _finish(self, way: str, microbatch: int) -> None:
        for wait, _ in self._sent.pop((way, microbatch), ()):
            wait()

    def _tilings(self, microbatch: int) -> tuple[Tiling, Tiling]:
        source, target = (
            activation_tiling(self._pipeline, stage, microbatch, self._shape)
            for stage in (self._stage, self._stage + 1)
        )
        return source, target

    def _send(
        self, way: str, microbatch: int, tensor: Tensor, held: Box, going: Sequence[Move]
    ) -> None:
        for number, move in _numbered(going):
            if move.src == self._comm.rank:
                part = tensor[move.box.within(held).slices()].to(self._dtype)
                if move.dst == self._comm.rank:
                    self._kept[way, microbatch, move.box] = part
                    continue
                part = part.contiguous()
                tag = self._tag(way, microbatch, number)
                wait = self._comm.send(part, dst=move.dst, tag=tag, name="activations")
                self._sent.setdefault((way, microbatch), []).append((wait, part))

    def _receive(self, way: str, microbatch: int, wanted: Box, coming: Sequence[Move]) -> Tensor:
        result = torch.empty(wanted.size, dtype=self._dtype, device=self._comm.device)
        arriving: list[tuple[Finish, Tensor, Box]] = []
        for number, move in _numbered(coming):
            if move.dst != self._comm.rank:
                continue
            if move.src == self._comm.rank:
                part = self._kept.pop((way, microbatch, move.box))
                result[move.box.within(wanted).slices()] = part
                continue
            part = torch.empty(move.box.size, dtype=self._dtype, device=self._comm.device)
            tag = self._tag(way, microbatch, number)
            wait = self._comm.receive(part, src=move.src, tag=tag, name="activations")
            arriving.append((wait, part, move.box))
        for wait, part, box in arriving:
            wait()
            result[box.within(wanted).slices()] = part
        return result

    def _tag(self, way: str, microbatch: int, number: int) -> int:
        """Unlike for everything that two ranks exchange in a step."""
        assert number < MAX_MOVES, f"{number + 1} moves between two ranks at one border"
        microbatches = self._pipeline.num_microbatches
        place = self._stage * microbatches + microbatch
        return (place * MAX_MOVES + number) * 2 + (way == "B")


def _numbered(going: Sequence[Move]) -> list[tuple[int, Move]]:
    """Every move with its number among those between the same two ranks: both ends agree."""
    seen: Counter[tuple[int, int]] = Counter()
    result = []
    for move in going:
        result.append((seen[move.src, move.dst], move))
        seen[move.src, move.dst] += 1
    return result
