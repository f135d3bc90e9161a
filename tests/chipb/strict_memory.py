"""Tensors of the fake chip while a call of the strict library uses them, on streams of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from chipb.chip import NAME, with_chips
from strict.group import session
from strict.memory import Lent, Memory
from strict.server import Where
from torch import Tensor

from weft.comm.address import RankAddress


class ChipMemory(Memory):
    """Each group has a stream; whoever waits for a call lets the current stream wait for that."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.Stream] = {}
        self._lent: list[Lent] = []
        """As NCCL does: what a call uses is kept until somebody waits for it."""

    def lend(
        self, text: str, group: int, *, given: Sequence[Tensor], taken: Sequence[Tensor]
    ) -> Lent:
        device = (*given, *taken)[0].device
        if group not in self._streams:
            self._streams[group] = torch.Stream(device=device)
        lent = _LentByChip(text, self._streams[group], given, taken, self._lent.remove)
        self._lent.append(lent)
        return lent


class _LentByChip(Lent):
    def __init__(
        self,
        text: str,
        stream: torch.Stream,
        given: Sequence[Tensor],
        taken: Sequence[Tensor],
        over: Callable[[Lent], None],
    ) -> None:
        self._over, self._device = over, stream.device
        self._tensors = [*given, *taken]
        self._taken = list(taken)
        before(stream)
        with stream:
            torch.ops.chipb.call(list(given), list(taken), text)
        self._event = stream.record_event()
        self.data = [torch.ops.chipb.load(each).numpy().tobytes() for each in given]

    def arrive(self, values: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._taken, values, strict=True):
            torch.ops.chipb.store(tensor, value.reshape(-1).view(torch.uint8))
        self.is_over = True

    def join(self) -> None:
        after(self._event, self._device)
        if self._tensors:
            self._tensors, self._taken = [], []
            self._over(self)


def before(stream: torch.Stream) -> None:
    """A call begins after what the current stream had to do when it was made."""
    stream.wait_stream(torch.accelerator.current_stream(stream.device))


def after(event: torch.Event, device: torch.device) -> None:
    """What the current stream does from now on comes after a call."""
    torch.accelerator.current_stream(device).wait_event(event)


def on_chips(address: RankAddress, where: Where, job: Callable[..., Any], *args: Any) -> Any:
    """``job(address, *args)`` on a rank whose chip talks through the strict server."""
    return with_chips(address, _on_chips, where, job, *args)


def _on_chips(address: RankAddress, where: Where, job: Callable[..., Any], *args: Any) -> Any:
    with session(address, where, NAME, ChipMemory()):
        return job(address, *args)
