"""What travels between two stages: the moves between their activation tilings.

A tree of tensors crosses, each along moves of its own; all of one microbatch go as one message to
each rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from weft.axes.held import tiling
from weft.axes.registry import AXES
from weft.comm.comm import Comm, Finish, Parts
from weft.comm.members import Channel, Edge, Message
from weft.comm.memory import ReusedMemory
from weft.comm.transport import nothing
from weft.nn.stage import Tree
from weft.parallel.casts import Code
from weft.plan.box import Box
from weft.plan.layout import Border, BorderTensor, Dim, Form
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.plan.tiling import Move, Stored, Tiling, moves
from weft.precision.casts import CASTS
from weft.precision.registry import PRECISIONS

Way = Literal["F", "B"]
"""Activations go forward, their gradients backward."""


_DTYPES = {"int64": torch.int64, "int32": torch.int32, "bool": torch.bool}


def activation_tiling(
    pipeline: PipelinePlan,
    stage: int,
    microbatch: int,
    dims: Sequence[Dim],
    form: Form = "stream",
) -> Tiling:
    """Where a stage's input or output of one microbatch lies; ``dims`` follow the samples."""
    samples = pipeline.split(stage, microbatch)
    of_one = tiling(dims, form, pipeline.stages[stage].mesh)
    boxes = {
        rank: tuple(
            Box((samples[rank].start, *box.offset), (len(samples[rank]), *box.size)) for box in held
        )
        for rank, held in of_one.boxes.items()
    }
    return Tiling((pipeline.size_of(microbatch), *of_one.shape), boxes)


def channel(pipeline: PipelinePlan, border: int, way: Way) -> Channel:
    """The channel of one way over a border: its ways never share one."""
    ranks = (pipeline.stages[end].mesh.ranks for end in pipeline.borders[border])
    return Channel(tuple(sorted({*chain.from_iterable(ranks)})), 2 * border + (way == "B"))


def channels(plan: Plan) -> Iterator[Channel]:
    """Every channel of a job, in the same order on every rank."""
    for pipeline in plan.pipelines:
        for border, (giver, taker) in enumerate(pipeline.borders):
            if pipeline.stages[giver].mesh.ranks != pipeline.stages[taker].mesh.ranks:
                ways: Sequence[Way] = ("F",) if giver in pipeline.heads else ("F", "B")
                yield from (channel(pipeline, border, way) for way in ways)


def edges(pipeline: PipelinePlan, borders: Mapping[int, Border]) -> dict[Channel, frozenset[Edge]]:
    """Who sends to whom over each channel of a pipeline, however many samples a microbatch has.

    Where a border depends on the batch: who may, for they have samples in common.
    """
    found: dict[Channel, frozenset[Edge]] = {}
    for border, ends in enumerate(pipeline.borders):
        forward, backward = set[Edge](), set[Edge]()
        for size in _sizes(pipeline, ends):
            alone = replace(pipeline, samples=size)
            if border not in borders:
                forward |= _with_samples_in_common(alone, ends, 0)
                backward = forward
                continue
            for tensor in borders[border].values():
                moved = {(src, dst) for src, dst, _ in _moves(alone, ends, 0, tensor)}
                forward |= moved
                backward |= moved if tensor.has_grad else set()
        found[channel(pipeline, border, "F")] = frozenset(forward)
        if ends[0] not in pipeline.heads:
            found[channel(pipeline, border, "B")] = frozenset((dst, src) for src, dst in backward)
    return found


def _sizes(pipeline: PipelinePlan, ends: tuple[int, int]) -> Sequence[int]:
    """Samples of a microbatch that make a difference: where both sides of a border divide them
    alike, a full one alone."""
    one, other = (pipeline.stages[end] for end in ends)
    most = min(pipeline.microbatch, pipeline.samples)
    alike = one.mesh.sample_ways == other.mesh.sample_ways
    if alike and one.sample_shares == other.sample_shares:
        return (most,)
    return range(1, most + 1)


def _with_samples_in_common(
    pipeline: PipelinePlan, ends: tuple[int, int], microbatch: int
) -> set[Edge]:
    given, taken = (activation_tiling(pipeline, stage, microbatch, ()) for stage in ends)
    return {
        (src, dst)
        for src, (sent,) in given.boxes.items()
        for dst, (wanted,) in taken.boxes.items()
        if sent.intersect(wanted) is not None
    }


def _moves(
    pipeline: PipelinePlan, ends: tuple[int, int], microbatch: int, tensor: BorderTensor
) -> list[Move]:
    """What carries a tensor over the border between two stages, forward."""
    return moves(*_tilings(pipeline, ends, microbatch, tensor))


def _tilings(
    pipeline: PipelinePlan, ends: tuple[int, int], microbatch: int, tensor: BorderTensor
) -> tuple[Tiling, Tiling]:
    """Where a tensor lies before it crosses, forward, and after."""
    before, after = (
        activation_tiling(pipeline, stage, microbatch, tensor.dims, tensor.form) for stage in ends
    )
    return before, after


def _code(stage: StagePlan, tensor: BorderTensor, way: Way) -> Code:
    """How a tensor travels from a stage to the next. Rows that some axis may cut are not cast."""
    if tensor.role != "compute":
        return Code(_dtype(stage, tensor))
    cuts = (axis.divides(tensor.dims[-1], "stream") for axis in AXES.values() if tensor.dims)
    if not stage.border or not tensor.dims or any(cuts):
        return Code(_dtype(stage, tensor))
    cast = CASTS[stage.border]
    name = cast.factors if way == "F" else cast.gradients
    return Code(vars(torch)[name], has_scales=cast.row_bytes > 0)


def _dtype(stage: StagePlan, tensor: BorderTensor) -> torch.dtype:
    """Of a tensor that a stage gives."""
    precision = PRECISIONS[stage.precision]
    match tensor.role:
        case "compute":
            return precision.compute.dtype
        case "wide":
            return precision.accumulation.dtype
        case other:
            return _DTYPES[other]


@dataclass(frozen=True, slots=True)
class _Route:
    """One rank's part in carrying one tensor of a microbatch over the border, one way."""

    held: Stored | None
    """What this rank's side of the border gives; None: it is on the other side."""
    wanted: Stored | None
    going: tuple[Move, ...]
    coming: tuple[Move, ...]


class StageBorder:
    """One border of a pipeline, by its number there, on one rank.

    Activations go forward along the moves from one tiling to the other, gradients of those that
    have one back along the same moves. Stages on one rank pass tensors by hand: such moves send
    nothing. Each way must be sent, and be expected, in the same order of microbatches. Where the
    plan says so, what is sent is cast.
    """

    def __init__(
        self,
        comm: Comm,
        pipeline: PipelinePlan,
        number: int,
        border: Border,
        memory: ReusedMemory | None = None,
    ) -> None:
        self._comm = comm
        self._memory = memory or ReusedMemory(comm.device)
        self._pipeline = pipeline
        self._ends = pipeline.borders[number]
        self._tensors: dict[Way, Border] = {
            "F": border,
            "B": {name: tensor for name, tensor in border.items() if tensor.has_grad},
        }
        self._channels = {way: channel(pipeline, number, way) for way in self._tensors}
        self._codes = {
            (way, name): _code(pipeline.stages[self._ends[0]], tensor, way)
            for way, tensors in self._tensors.items()
            for name, tensor in tensors.items()
        }
        self._routes: dict[tuple[Way, int], dict[str, _Route]] = {}
        self._sent: dict[tuple[Way, int], tuple[Finish, Parts]] = {}
        self._arriving: dict[tuple[Way, int], tuple[Finish, dict[tuple[str, Box], Tensor]]] = {}
        """Receives that were started, and the memory that each box of a tensor comes to."""
        self._kept: dict[tuple[Way, int, str, Box], Tensor] = {}

    @property
    def differentiable(self) -> Collection[str]:
        """The tensors whose gradients come back."""
        return self._tensors["B"].keys()

    def messages(self, way: Way, *, sent: int, received: int) -> Iterator[Message]:
        """What as many microbatches under way at once send and receive.

        And one more: who carries messages may not have let go of the last one yet.
        """
        rank, over = self._comm.rank, self._channels[way]
        first, last = 0, self._pipeline.num_microbatches - 1
        for microbatch, of_each in ((first, (sent + 1, received + 1)), (last, (2, 2))):
            if microbatch and self._pipeline.size_of(last) == self._pipeline.size_of(first):
                continue
            for name, route in self._routes_of(way, microbatch).items():
                going = [move.box.size for move in route.going if move.dst != rank]
                coming = [move.box.size for move in route.coming if move.src != rank]
                boxes, code = going * of_each[0] + coming * of_each[1], self._codes[way, name]
                yield from (Message(over, code.size(size), code.dtype) for size in boxes)

    def send(self, way: Way, microbatch: int, tree: Tree) -> None:
        """Hand on this rank's part of what the first stage gives, or of the gradients of that."""
        parts = []
        for name, route in self._routes_of(way, microbatch).items():
            assert route.held is not None, f"rank {self._comm.rank} has nothing to send {way}"
            for move in route.going:
                part = tree[name][route.held.slices(move.box)]
                if move.dst == self._comm.rank:
                    kept = part.to(self._dtype(way, name))
                    self._kept[way, microbatch, name, move.box] = kept
                else:
                    parts.append((move.dst, self._sendable(part, self._codes[way, name])))
        if parts:
            over = self._channels[way]
            finish = self._comm.send(parts, channel=over, name="activations")
            self._sent[way, microbatch] = finish, parts

    def expect(self, way: Way, microbatch: int) -> None:
        """Start to receive what ``receive`` will be asked for, so that it can come meanwhile."""
        parts: list[tuple[int, Tensor]] = []
        memory: dict[tuple[str, Box], Tensor] = {}
        for name, route in self._routes_of(way, microbatch).items():
            for move in route.coming:
                if move.src != self._comm.rank:
                    code = self._codes[way, name]
                    room = self._memory.take(code.size(move.box.size), code.dtype)
                    memory[name, move.box] = room
                    parts.append((move.src, memory[name, move.box]))
        wait: Finish = nothing
        if parts:
            over = self._channels[way]
            wait = self._comm.receive(parts, channel=over, name="activations")
        self._arriving[way, microbatch] = wait, memory

    def receive(self, way: Way, microbatch: int) -> dict[str, Tensor]:
        """This rank's part of what the second stage takes, or of the gradients that come back.

        What comes from another rank must be expected.
        """
        wait, memory = self._arriving.pop((way, microbatch), (nothing, {}))
        wait()
        result = {}
        for name, route in self._routes_of(way, microbatch).items():
            assert route.wanted is not None, f"rank {self._comm.rank} gets nothing {way}"
            parts = []
            for src, _, box in route.coming:
                by_hand = src == self._comm.rank
                key = (way, microbatch, name, box)
                parts.append((box, self._kept.pop(key) if by_hand else memory[name, box]))
            dtype = self._dtype(way, name)
            if len(parts) == 1 and parts[0][1].dtype == dtype:
                result[name] = parts[0][1]
                continue
            result[name] = self._memory.take(route.wanted.size, dtype)
            for box, part in parts:
                self._codes[way, name].decode(part, result[name][route.wanted.slices(box)])
        return result

    def _sendable(self, part: Tensor, code: Code) -> Tensor:
        """The part itself where it can be sent as it is, else a copy, or what it is cast to."""
        if part.dtype == code.dtype and part.is_contiguous():
            return part
        message = self._memory.take(code.size(tuple(part.shape)), code.dtype)
        code.encode(part, message)
        return message

    def _dtype(self, way: Way, name: str) -> torch.dtype:
        return _dtype(self._pipeline.stages[self._ends[0]], self._tensors[way][name])

    def release(self, way: Way, microbatch: int) -> None:
        """Let go of what was sent. Waits until it has left."""
        sent = self._sent.pop((way, microbatch), None)
        if sent is not None:
            finish, _ = sent
            finish()

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for way, microbatch in list(self._sent):
            self.release(way, microbatch)
        assert not self._kept and not self._arriving, f"left over: {self._kept}, {self._arriving}"

    def _routes_of(self, way: Way, microbatch: int) -> dict[str, _Route]:
        """By tensor; the same for all microbatches of a size."""
        size = self._pipeline.size_of(microbatch)
        if (way, size) not in self._routes:
            self._routes[way, size] = {
                name: self._make_route(way, microbatch, tensor)
                for name, tensor in self._tensors[way].items()
            }
        return self._routes[way, size]

    def _make_route(self, way: Way, microbatch: int, tensor: BorderTensor) -> _Route:
        source, target = _tilings(self._pipeline, self._ends, microbatch, tensor)
        travelling: Sequence[Move] = moves(source, target)
        if way == "B":
            source, target = target, source
            travelling = [Move(dst, src, box) for src, dst, box in travelling]
        rank = self._comm.rank  # both ends keep the order of this list
        route = _Route(
            held=Stored(source.boxes[rank]) if rank in source.boxes else None,
            wanted=Stored(target.boxes[rank]) if rank in target.boxes else None,
            going=tuple(move for move in travelling if move.src == rank),
            coming=tuple(move for move in travelling if move.dst == rank),
        )
        wanted = 0 if route.wanted is None else route.wanted.numel
        arriving = sum(move.box.numel for move in route.coming)
        assert arriving == wanted, f"rank {rank} {way}: {arriving} of {wanted} elements arrive"
        return route
