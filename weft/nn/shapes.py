"""Modules that are built for their shapes: they hold no memory and no values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

_DRAWN = (init.kaiming_uniform_, init.normal_, init.uniform_)


@contextmanager
def only_shapes() -> Iterator[None]:
    """What is built here is on PyTorch's meta device, and nothing is drawn for it.

    Drawing for a tensor without memory does nothing, and imports PyTorch's compiler to do it.
    """
    with torch.device("meta"), _NothingDrawn():
        yield


class _NothingDrawn(TorchFunctionMode):
    """Answers for the functions that draw a module's first values."""

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _DRAWN:
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))
