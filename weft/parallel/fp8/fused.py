"""Passes over memory that are compiled by themselves, where no compiled block looks in.

Layers whose scales are of several ranks or of earlier steps are called as they are. One pass for
each operation of their rounding took longer than all else in a step of 8B layers on a card. What is
compiled takes ``[a, b, c]`` of which all along ``b`` have one scale: few kinds of sizes are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor


@cache
def compiled(work: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One program for all sizes; of ever new kinds of sizes it goes on without the compiler."""
    return torch.compile(work, dynamic=True)


def in_three(x: Tensor, along: Sequence[int]) -> Tensor:
    """``[a, b, c]``; ``along`` are the dimensions of ``b``, one after another."""
    first, last = along[0], along[-1] + 1
    assert list(along) == list(range(first, last)), f"{along} has others between"
    sizes = x.shape
    return x.detach().reshape(prod(sizes[:first]), prod(sizes[first:last]), prod(sizes[last:]))


def contiguous(values: Tensor) -> Tensor:
    """Of a matrix in eight bits that may be turned."""
    if values.is_contiguous() or values.dim() != 2 or not values.T.is_contiguous():
        return values.contiguous()
    return compiled(_turned)(values.T.view(torch.uint8)).view(values.dtype)


def _turned(x: Tensor) -> Tensor:
    return x.T.contiguous()
