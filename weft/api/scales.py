"""Scales of earlier steps in a script's own checkpoints: a tensor of the model's ``state_dict``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.api.owned import Owned
from weft.config.errors import ConfigError
from weft.parallel.fp8.history import Histories

KEY = "fp8_scales"
"""Beside the parameters: the largest magnitudes, ``[layers, 3, steps]`` in fp32."""


def keep_scales(model: nn.Module, histories: Histories) -> None:
    """Let what a woven model saves hold them, and what it loads bring them back.

    What was saved without them begins anew; what other layers or another ``history`` had is
    refused. A copy of the model has none: it loads what the model saves, and leaves its alone.
    """
    owned = Owned(histories)
    model.register_state_dict_post_hook(partial(_save, owned))  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(partial(_load, owned))  # type: ignore[no-untyped-call]


def _save(
    owned: Owned[Histories], _: nn.Module, state: dict[str, Any], prefix: str, __: object
) -> None:
    if owned.value is not None:
        state[prefix + KEY] = torch.stack([*owned.value.named().values()])


def _load(
    owned: Owned[Histories], _: nn.Module, state: dict[str, Any], prefix: str, *__: object
) -> None:
    saved = state.pop(prefix + KEY, None)
    if owned.value is None:
        return
    named = owned.value.named()
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

    owned.value.restore(read)
