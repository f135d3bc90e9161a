"""Copies of a card's state beside what it computes; on a fake chip ``tests/chipb`` tries them."""

from __future__ import annotations

import pytest
import torch

from weft.checkpoint.agent.download import Downloads
from weft.train.still_read import StillRead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that PyTorch can use"),
]


def test_a_copy_is_what_was_there_before_the_next_update() -> None:
    """64 MiB by way of 16, while the card computes and then changes what is copied."""
    device, host = torch.device("cuda", 0), bytearray(1 << 26)
    downloads, still_read = Downloads(device, most_bytes=1 << 24), StillRead()
    for time in range(3):
        state = torch.arange(1 << 24, dtype=torch.int32, device=device) + time

        def write(data: memoryview, place: int) -> None:
            host[place : place + len(data)] = data

        download = downloads.begin([(state, 0)], write, lambda: None)
        busy = torch.ones(4096, 4096, device=device)
        for _ in range(10):
            busy = busy @ busy
        still_read.until(download.has_read)
        still_read.wait(device)
        state.zero_()
        download.arrives.result(60)
        torch.cuda.synchronize()
        assert still_read.is_known
        assert 0 <= still_read.waited_s() < 60
        found = torch.frombuffer(host, dtype=torch.int32)
        assert torch.equal(found, torch.arange(1 << 24, dtype=torch.int32) + time)
    assert downloads.made == 2
    downloads.close()
