"""The hook that finds a parameter's gradients, and whether others wait for them too."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor


class Taker(Protocol):
    """Who moves gradients away as they come."""

    def take(self, param: Tensor) -> None:
        """One is complete for this microbatch, or None where it is put off."""


class Take:
    """Autograd's hook on each parameter. It does not keep its owner alive.

    Part of the way from a parameter to its hook lies in autograd's own nodes, where Python's
    collector cannot see it: a hook that held them would keep model, buffers and groups for ever.
    """

    def __init__(self, owner: Taker) -> None:
        self._owner = weakref.ref(owner)

    @property
    def is_alive(self) -> bool:
        return self._owner() is not None

    def __call__(self, param: Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.take(param)


def takes_gradients_of(param: Tensor) -> bool:
    """Something moves each gradient of this parameter away as it comes."""
    hooks = param._post_accumulate_grad_hooks or {}
    return any(isinstance(hook, Take) and hook.is_alive for hook in hooks.values())


def is_watched(param: Tensor) -> bool:
    """Others have hooks on this parameter, which are to see each gradient or to change it."""
    hooks = param._post_accumulate_grad_hooks or {}
    return bool(param._backward_hooks) or not all(isinstance(h, Take) for h in hooks.values())
