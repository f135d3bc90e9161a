"""Faults that were taken out of weft, or never were in it, put into the ranks of a job."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

from parallel.hardware_queues import always_early
from parity.cases import Case

from weft.comm.comm import Comm, Finish
from weft.comm.transport import nothing
from weft.nn.stage import Tree
from weft.parallel.pipeline.stage_border import StageBorder, Way
from weft.schedules.action import Action
from weft.schedules.clocks import Clocks

RAGGED = Case("ragged", shares=(6,), microbatch=4, dp=((1, 1),), layers=((2, 2),))
"""Two microbatches, of four samples and of two."""
PLAIN = Case("plain", shares=(6,), dp=((1, 1),), layers=((2, 2),), schedule="gpipe")


Fault = Callable[[int], AbstractContextManager[Any]]
"""Meanwhile the rank of this number does it wrong."""


def too_early(rank: int) -> AbstractContextManager[Any]:
    """Every receive two actions ahead, whatever its sender waits for."""

    def early(clocks: Clocks) -> list[list[list[Action]]]:
        return [always_early(clocks, position) for position in range(len(clocks.schedule))]

    return mock.patch("weft.parallel.pipeline.executor.receives", early)


def swapped(rank: int) -> AbstractContextManager[Any]:
    """The first rank sends the second microbatch before the first."""
    send, held = StageBorder.send, []

    def later(border: StageBorder, way: Way, microbatch: int, tree: Tree) -> None:
        if microbatch == 0:
            held.append(tree)
            return
        send(border, way, microbatch, tree)
        if held:
            send(border, way, 0, held.pop())

    return mock.patch.object(StageBorder, "send", later) if rank == 0 else nullcontext()


def without_wait(rank: int) -> AbstractContextManager[Any]:
    """The stream that computes does not wait for what was received."""
    receive = Comm.receive

    def unawaited(*args: Any, **names: Any) -> Finish:
        receive(*args, **names)
        return nothing

    return mock.patch.object(Comm, "receive", unawaited)
