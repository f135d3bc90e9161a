"""Blocks, and parts of them, whose activations backward computes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from weft.config.errors import ConfigError
from weft.nn.stage import Unit, parts_of
from weft.recompute.mode import Mode
from weft.recompute.registry import MODES


def recompute(unit: Unit, mode: Mode) -> None:
    """Let backward compute again what a mode says, in the unit's block.

    Raises:
        ConfigError: the block names no such part.
    """
    wrapped = partial(Recomputed, draws=unit.draws, chunk_tokens=mode.chunk_tokens)
    if not mode.part:
        unit.wrap(wrapped)
        return
    assert unit.block is not None, "only blocks have parts"
    parts = parts_of(unit.block)
    if mode.part not in parts:
        kind, known = type(unit.block).__name__, (each for each in MODES.values() if each.part)
        others = [each.name for each in known if each.part in parts]
        expected = f"one of {', '.join(['off', *others, 'full'])} for such a model"
        hint = f"{kind} has no part {mode.part!r} (weft.nn.stage.Part) of its own."
        raise ConfigError("compute.recompute", mode.name, expected, hint)
    for part in parts[mode.part]:
        part.call = wrapped(part.call)


class Recomputed(nn.Module):
    """A block, or a part of one, that keeps its input instead of its activations, which backward
    computes again. The same numbers, bit for bit.

    ``draws``: it takes random numbers from PyTorch, whose state is then restored. Weft's own
    dropout is a function of sample and position and needs none of that. ``chunk_tokens``: it takes
    one tensor ``[batch, seq, ..]``, at most so many tokens of it at once; 0: all.
    """

    def __init__(
        self, block: Callable[..., Any], *, draws: bool = False, chunk_tokens: int = 0
    ) -> None:
        super().__init__()
        self.block = block
        self._draws = draws
        self._chunk_tokens = chunk_tokens

    def forward(self, *args: Any) -> Any:
        if not self._chunk_tokens or args[0].shape[:2].numel() <= self._chunk_tokens:
            return self._compute(*args)
        (x,) = args
        chunks = torch.split(x, max(1, self._chunk_tokens // len(x)), dim=1)
        return torch.cat([self._compute(chunk) for chunk in chunks], dim=1)

    def _compute(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, preserve_rng_state=self._draws)
