"""The logical view of any module, by running it on the meta device: nothing is computed.

For models that have no ``ModelShape``. PyTorch's own counter sees matrix products and the fused
attentions that it knows; bytes kept are those that autograd really saves for backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from weft.config.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """One forward and backward of a module."""

    params: int
    """Elements; a shared parameter counts once."""
    forward_flops: int
    backward_flops: int
    kept_bytes: int
    """From forward to backward, parameters and buffers apart."""


def trace(module: nn.Module, inputs: Callable[[], tuple[Any, ...]]) -> Traced:
    """Run a copy of the module on the meta device; ``inputs`` makes its arguments there.

    Raises:
        ConfigError: it does not run there, because it looks at values, or without gradients.
    """
    own = copy.deepcopy(module).to("meta")
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no storage's number is given out twice
    standing = {_storage(tensor) for tensor in (*own.parameters(), *own.buffers())}

    def note(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in standing:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    try:
        with torch.device("meta"), saved_tensors_hooks(note, lambda tensor: tensor), forward:
            results = [tensor for tensor in _tensors(own(*inputs())) if tensor.requires_grad]
        with backward:
            torch.autograd.backward(results, [torch.ones_like(tensor) for tensor in results])
    except RuntimeError as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        hint = f"{reason} Describe its sizes with a ModelShape instead."
        expected = "a module that runs on the meta device, forward and backward"
        raise ConfigError("model", type(module).__name__, expected, hint) from error
    return Traced(
        params=sum(parameter.numel() for parameter in own.parameters()),
        forward_flops=forward.get_total_flops(),
        backward_flops=backward.get_total_flops(),
        kept_bytes=sum(kept.values()),
    )


def _storage(tensor: Tensor) -> int:
    """On the meta device all data pointers are null; the storage object is what differs."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
