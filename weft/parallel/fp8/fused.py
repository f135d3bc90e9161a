"""Passes over memory that are compiled by themselves, where no compiled block looks in.

Layers whose scales are of several ranks are called as they are. One pass for each operation of
their rounding takes longer than all else in a step of 8B layers on a card. What is compiled takes
``[a, b, c]`` of which all along ``b`` have one scale: few kinds of sizes are left. The compiler
makes eight programs of a function and then no more, so each kind has one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch import Tensor


def compiled(work: Callable[..., Tensor], *given: Any) -> Tensor:
    """What ``work``, of tensors and dtypes, makes of it."""
    kind = tuple(
        (x.dtype, *(size == 1 for size in x.shape)) if isinstance(x, Tensor) else x for x in given
    )
    return _program(work, kind)(*given)


@cache
def _program(work: Callable[..., Tensor], kind: tuple[object, ...]) -> Callable[..., Tensor]:
    assert isinstance(work, FunctionType), f"{work} is no function"
    code = work.__code__.replace(co_name=f"{work.__name__}_{abs(hash(kind))}")
    own = FunctionType(code, work.__globals__, code.co_name)
    return torch.compile(own, dynamic=True)


def in_three(x: Tensor, along: Sequence[int]) -> Tensor:
    """``[a, b, c]``; ``along`` are the dimensions of ``b``, one after another."""
    first, last = along[0], along[-1] + 1
    assert list(along) == list(range(first, last)), f"{along} has others between"
    sizes = x.shape
    parts = x.reshape(prod(sizes[:first]), prod(sizes[first:last]), prod(sizes[last:]))
    return parts.data  # no view: what it was a view of would be part of what is compiled for


def contiguous(values: Tensor) -> Tensor:
    """Of a matrix in eight bits that may be turned."""
    if values.is_contiguous() or values.dim() != 2 or not values.T.is_contiguous():
        return values.contiguous()
    return compiled(_turned, values.T.view(torch.uint8).data).view(values.dtype)


def _turned(x: Tensor) -> Tensor:
    return x.T.contiguous()
