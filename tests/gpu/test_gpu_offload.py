"""What waits in the host's memory, on a card; on a fake chip ``tests/chipb`` tries the same."""

from __future__ import annotations

import gc

import pytest
import torch

from weft.memory.belt import Belt
from weft.memory.kept import carry, zeros
from weft.platform.registry import platform_named
from weft.precision.roles import Role

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that PyTorch can use"),
]


def test_bytes_are_locked_and_given_back() -> None:
    platform = platform_named("cuda")
    for num_bytes in (1, 5000, 3 << 20):
        locked = platform.page_locked(num_bytes)
        assert locked.is_pinned()
        assert len(locked) == num_bytes
        assert not locked.any()
        part = locked[num_bytes // 2 :]
        del locked
        gc.collect()
        assert part.is_pinned(), "a view keeps them"
        part.copy_(torch.ones(len(part), dtype=torch.uint8, device="cuda"), non_blocking=True)
        torch.cuda.synchronize()
        assert part.all()
        address = part.data_ptr()
        del part
        gc.collect()
        assert torch.cuda.cudart().cudaHostUnregister(address) != 0, "nothing is locked there"
        with pytest.raises(RuntimeError):
            torch.zeros(1, device="cuda")


def test_pieces_change_where_they_are() -> None:
    """Two thirds page-locked, a third not, in more pieces than there are rooms."""
    device = torch.device("cuda", 0)
    pieces = []
    for number in range(7):
        locked = [zeros((300_000,), Role("float32", tier="host"), device) for _ in range(2)]
        pieces.append([*locked, torch.zeros(70_001)])
        for tensor in pieces[-1]:
            tensor.fill_(number)
    belt = Belt(device, pieces)
    for _ in range(3):
        for here in belt.each():
            for tensor in here:
                tensor.add_(1)
    for number, piece in enumerate(pieces):
        assert all(tensor.eq(number + 3).all() for tensor in piece)


def test_what_changes_its_dtype_on_the_way_is_rounded_alike() -> None:
    device = torch.device("cuda", 0)
    values = zeros((70_001, 300), Role("float32", tier="host"), device)
    values.normal_()
    there = torch.empty(values.shape, dtype=torch.bfloat16, device=device)
    carry(values, there, by=device)
    assert torch.equal(there.cpu(), values.bfloat16())
    back = torch.empty(values.shape)
    carry(there, back, by=device)
    assert torch.equal(back, values.bfloat16().float())
