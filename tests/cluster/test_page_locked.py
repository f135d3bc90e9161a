"""Page-locked memory, by a driver that notes what it is asked; ``tests/gpu`` asks a real one."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.platform.cuda import PLATFORM


class Driver:
    """Of a card: registers, and says no where it is told to."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.locked: dict[int, int] = {}

    def register(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        if not self.code:
            self.locked[address] = num_bytes
        return self.code

    def unregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def driver_of(monkeypatch: pytest.MonkeyPatch, code: int) -> Driver:
    driver = Driver(code)
    calls = SimpleNamespace(cudaHostRegister=driver.register, cudaHostUnregister=driver.unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    return driver


@pytest.mark.parametrize("num_bytes", [1, 5000, 3 << 20])
def test_as_many_bytes_are_locked_as_asked_for_and_as_long_as_anything_reads_them(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_of(monkeypatch, code=0)
    flat = PLATFORM.page_locked(num_bytes)
    assert driver.locked == {flat.data_ptr(): num_bytes}
    assert len(flat) == num_bytes and not flat.any()
    part = flat[num_bytes // 2 :].fill_(7)
    del flat
    gc.collect()
    assert len(driver.locked) == 1, "a view keeps them"
    assert part.eq(7).all()
    del part
    gc.collect()
    assert not driver.locked


def test_where_the_driver_locks_no_more_it_is_memory_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the driver refused it tells whoever asks next, who had nothing to do with it."""
    driver = driver_of(monkeypatch, code=2)
    told: list[Any] = []

    def zeros(*size: int, device: str) -> None:
        told.append((size, device))
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", zeros)
    flat = PLATFORM.page_locked(100)
    assert told == [((1,), "cuda")]
    assert not flat.any()
    del flat
    gc.collect()
    assert not driver.locked
