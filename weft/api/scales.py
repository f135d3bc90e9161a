"""Scales of earlier steps in a script's own checkpoints: a tensor of the model's ``state_dict``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.config.errors import ConfigError
from weft.parallel.fp8.history import Histories

KEY = "fp8_scales"
"""Beside the parameters: the largest magnitudes, ``[layers, 3, steps]`` in fp32."""


def keep_scales(model: nn.Module, histories: Histories) -> None:
    """Let what a woven model saves hold them, and what it loads bring them back.

    What was saved without them begins anew; what other layers or another ``history`` had is
    refused.
    """

    def save(_: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
        state[prefix + KEY] = torch.stack([*histories.named().values()])

    def load(_: nn.Module, state: dict[str, Any], prefix: str, *__: object) -> None:
        saved = state.pop(prefix + KEY, None)
        named = histories.named()
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

        histories.restore(read)

    model.register_state_dict_post_hook(save)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(load)  # type: ignore[no-untyped-call]
