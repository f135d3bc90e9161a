"""The device is as strict as hardware: what would be wrong on a real one fails on it too."""

from collections.abc import Callable, Mapping
from math import isnan
from typing import Any

import pytest
import torch
from chipb.chip import NAME, with_chips

from weft.comm.address import RankAddress
from weft.comm.transport import HostCopies, nothing
from weft.elastic.pool import WorkerPool


def on_the_device(address: RankAddress, name: str) -> Any:
    return FACTS[name](torch.device(NAME, 1))


def late_copy(device: torch.device, *, lent: bool, kept: bool) -> list[list[float]]:
    """A copy on a side stream to pinned memory: before and after somebody waits for it."""
    host = torch.zeros(4, pin_memory=True)
    side = torch.Stream(device=device)
    ones = torch.ones(4, device=device)
    side.wait_stream(torch.accelerator.current_stream(device))
    with side:
        host.copy_(ones, non_blocking=True)
    if lent:
        ones.record_stream(side)
    event = side.record_event()
    if not kept:
        del ones
    early = host.clone()
    event.synchronize()
    return [early.tolist(), host.tolist()]


def beside_the_host(device: torch.device) -> str:
    try:
        torch.mm(torch.ones(2, 2, device=device), torch.ones(2, 2))
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def freed_before_it_arrives(device: torch.device) -> list[float]:
    """What ``HostCopies`` guards against: the caller lets go of a tensor that it handed over."""
    copies = HostCopies(device)
    tensor = torch.arange(5.0).to(device)
    host, ready = copies.down(tensor)
    del tensor
    ready()
    copies.close(wait=True)
    return host.tolist()


def room_used_again(device: torch.device) -> bool:
    """The next collective gets host memory that the device may still have to read, and waits."""
    copies = HostCopies(device)
    came = torch.empty(64, device=device)
    room, before = copies.room(came)
    place = room.data_ptr()
    copies.up(room, came)
    del room
    again, after = copies.room(came)
    copies.close(wait=True)
    return again.data_ptr() == place and before is nothing is not after


FACTS: Mapping[str, Callable[[torch.device], Any]] = {
    "new memory": lambda device: torch.empty(3, device=device).tolist(),
    "beside the host": beside_the_host,
    "late": lambda device: late_copy(device, lent=False, kept=True),
    "freed": lambda device: late_copy(device, lent=False, kept=False),
    "lent": lambda device: late_copy(device, lent=True, kept=False),
    "host copies": freed_before_it_arrives,
    "room used again": room_used_again,
    "device of a result": lambda device: str(torch.ones(2, device=device).sum().device),
}


@pytest.fixture
def fact(chips: WorkerPool) -> Callable[[str], Any]:
    def ask(name: str) -> Any:
        return chips.run(with_chips, on_the_device, name, world_size=1)[0]

    return ask


def test_tensors_are_on_a_device_of_another_type(fact: Callable[[str], Any]) -> None:
    assert fact("device of a result") == f"{NAME}:1"
    assert "chipb" in fact("beside the host")
    assert all(map(isnan, fact("new memory")))


def test_a_copy_to_the_host_arrives_when_it_is_waited_for(fact: Callable[[str], Any]) -> None:
    early, late = fact("late")
    assert early == [0.0] * 4
    assert late == [1.0] * 4


def test_memory_is_kept_for_a_stream_that_it_was_lent_to(fact: Callable[[str], Any]) -> None:
    assert all(map(isnan, fact("freed")[1]))
    assert fact("lent")[1] == [1.0] * 4
    assert fact("room used again") is True
    assert fact("host copies") == [0.0, 1.0, 2.0, 3.0, 4.0]
