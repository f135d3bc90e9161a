"""Copies to a device that the host does not wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.cluster.cluster import HOST

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, copied in the order of the current stream.

    By way of page-locked memory, which PyTorch keeps until the copy is done: from other memory a
    device copies only while the host waits, and it first ends what it was asked before.
    """
    if device.type == HOST:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
