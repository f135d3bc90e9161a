"""Scales of earlier steps in a script's own checkpoints: a tensor of the model's ``state_dict``."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from weft.config.errors import ConfigError
from weft.parallel.fp8.history import Histories

KEY = "fp8_scales"
"""Beside the parameters: the largest magnitudes, ``[layers, 3, steps]`` in fp32."""


def keep_scales(model: nn.Module, histories: Histories) -> None:
    """Let what a woven model saves hold them, and what it loads bring them back.

    What was saved without them begins anew; what other layers or another ``history`` had is
    refused. A copy of the model has none: it loads what the model saves, and leaves its alone.
    """
    model.register_state_dict_post_hook(_Save(histories))  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(_Load(histories))  # type: ignore[no-untyped-call]


class _Hook:
    """A model's alone, as its engine is."""

    def __init__(self, histories: Histories | None) -> None:
        self._histories = histories

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return type(self)(None)

    def __reduce__(self) -> tuple[type[Self], tuple[None]]:
        return type(self), (None,)


class _Save(_Hook):
    def __call__(self, _: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
        if self._histories is not None:
            state[prefix + KEY] = torch.stack([*self._histories.named().values()])


class _Load(_Hook):
    def __call__(self, _: nn.Module, state: dict[str, Any], prefix: str, *__: object) -> None:
        saved = state.pop(prefix + KEY, None)
        if self._histories is None:
            return
        named = self._histories.named()
        found: dict[str, Tensor] = {}
        if saved is not None:
            expected = (len(named), *next(iter(named.values())).shape)
            if tuple(saved.shape) != expected:
                raise ConfigError(KEY, list(saved.shape), f"the shape {list(expected)}")
            found = dict(zip(named, saved, strict=True))

        def read(out: Tensor, name: str) -> bool:
            if name in found:
                out.copy_(found[name])
            return name in found

        self._histories.restore(read)
