"""Work on the device's streams is in order only where an event makes it so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from chipb.chip import NAME, with_chips

from weft.comm.address import RankAddress
from weft.comm.transport import HostCopies
from weft.elastic.failure import RanksFailedError
from weft.elastic.pool import WorkerPool


def streams(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    return torch.accelerator.current_stream(device), torch.Stream(device=device)


def read(device: torch.device, *, waits: bool) -> None:
    """What one stream made, another one reads."""
    current, side = streams(device)
    made = torch.ones(4, device=device)
    if waits:
        side.wait_stream(current)
    with side:
        made.square()


def overwrite(device: torch.device, *, waits: bool) -> None:
    """What one stream still reads, another one writes."""
    current, side = streams(device)
    made = torch.ones(4, device=device)
    side.wait_stream(current)
    with side:
        made.square()
        event = side.record_event()
    if waits:
        current.wait_event(event)
    made.zero_()


def reuse(device: torch.device, *, waits: bool) -> None:
    """Memory that a stream still reads goes to somebody else."""
    current, side = streams(device)
    made = torch.ones(4, device=device)
    side.wait_stream(current)
    with side:
        made.square()
    if waits:
        made.record_stream(side)
    del made
    torch.zeros(4, device=device)


def new_memory(device: torch.device, *, waits: bool) -> None:
    """Memory is that of the stream on which it was allocated, whoever had it before."""
    current, side = streams(device)
    torch.ones(4, device=device)
    room = torch.empty(4, device=device)
    if waits:
        side.wait_stream(current)
    with side:
        room.fill_(1.0)


def by_the_host(device: torch.device, *, waits: bool) -> None:
    """The host waits for one stream, and goes on with another."""
    _, side = streams(device)
    side.wait_stream(torch.accelerator.current_stream(device))
    with side:
        made = torch.ones(4, device=device)
    if waits:
        side.synchronize()
    made.sum()


def parts(device: torch.device, *, waits: bool) -> None:
    """Two parts of one block are two things, unless they overlap."""
    current, side = streams(device)
    whole = torch.zeros(8, device=device)
    side.wait_stream(current)
    with side:
        whole[:4].fill_(1.0)
    whole[4:].fill_(2.0) if waits else whole[3:].fill_(2.0)


def down(device: torch.device, *, waits: bool) -> None:
    """What goes to other ranks by way of the host waits for what made it."""
    copies = HostCopies(device)
    made = torch.arange(5.0).to(device).square()
    hasty = mock.patch("torch.accelerator.current_stream", return_value=copies._side)
    with nullcontext() if waits else hasty:
        _, ready = copies.down(made)
    ready()
    copies.close(wait=True)


CASES: Mapping[str, tuple[Callable[..., None], str]] = {
    "read": (read, r"aten::pow\S* on stream \d+ reads what aten::fill_ on stream 0 writes"),
    "overwrite": (overwrite, r"aten::zero_ on stream 0 writes what aten::pow\S* on stream \d+ r"),
    "reuse": (reuse, "reads, whose memory was freed without record_stream: no event makes it wait"),
    "new memory": (new_memory, r"aten::fill_ on stream \d+ writes what allocating on stream 0"),
    "by the host": (by_the_host, r"aten::sum\S* on stream 0 reads what aten::fill_ on stream \d+"),
    "parts": (parts, r"aten::fill_ on stream 0 writes what aten::fill_ on stream \d+ writes"),
    "down": (
        down,
        r"copy to the host on stream \d+ reads what aten::pow\S* on stream 0 writes: "
        r"no event makes it wait \(at weft/comm/transport\.py:\d+ down\)",
    ),
}  # fmt: skip


def on_streams(address: RankAddress, name: str, waits: bool) -> None:
    CASES[name][0](torch.device(NAME, 0), waits=waits)


@pytest.mark.parametrize("name", CASES)
def test_a_missing_wait_fails_with_both_names(name: str, chips: WorkerPool) -> None:
    chips.run(with_chips, on_streams, name, True, world_size=1)
    with pytest.raises(RanksFailedError, match=CASES[name][1]):
        chips.run(with_chips, on_streams, name, False, world_size=1)
