"""Rotary positions beyond the length first trained on: pairs of channels turn more slowly.

Linear: all of them alike (arXiv 2306.15595). Dynamic: the slower a pair, the more, and only as far
as a sample is long ("dynamic NTK", arXiv 2309.00071, sections 3.1 and 3.3). YaRN: pairs that turn
seldom in the length first trained on, by a ramp over the pairs ("NTK by parts", section 3.2), and
attention becomes sharper (3.4). Llama 3: as YaRN, by a ramp over how often they turn, with
attention as it was (arXiv 2407.21783). Numbers are those of Hugging Face's ``rope_parameters``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.plan.model import RopeScaling


def stretched(frequency: Tensor, scaling: RopeScaling, *, theta: float, length: int) -> Tensor:
    """How far pairs turn a token that turned by ``frequency`` ``[d_head / 2]``, in samples of
    ``length`` tokens. ``theta``: the base that these are of."""
    factor, original = scaling.factor, scaling.original_seq_len
    if scaling.kind == "linear":
        return frequency / factor
    assert original is not None, scaling
    if scaling.kind == "dynamic":
        slowest = factor * max(length / original, 1.0) - (factor - 1)
        part = torch.linspace(0, 1, len(frequency), dtype=frequency.dtype, device=frequency.device)
        return frequency / slowest**part
    of_kind = _kept_by_pairs if scaling.kind == "yarn" else _kept_by_turns
    kept = of_kind(frequency, scaling, original, theta)
    return frequency * kept + frequency / factor * (1 - kept)


def sharpness(scaling: RopeScaling | None) -> float:
    """What cosines and sines are multiplied by."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0


def _kept_by_pairs(frequency: Tensor, scaling: RopeScaling, original: int, theta: float) -> Tensor:
    """1 where a pair turns as before, 0 where it is slowed in full."""

    def pair(turns: float) -> float:
        """The number, in parts of one, of the pair that turns so often."""
        return len(frequency) * math.log(original / (2 * math.pi * turns)) / math.log(theta)

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(frequency) - 1)
    numbers = torch.arange(len(frequency), device=frequency.device).to(frequency.dtype)
    return 1 - ((numbers - first) / (last - first or 1e-3)).clamp(0, 1)


def _kept_by_turns(frequency: Tensor, scaling: RopeScaling, original: int, _theta: float) -> Tensor:
    """Likewise."""
    turns = original * frequency / (2 * math.pi)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    return ((turns - scaling.low_freq_factor) / width).clamp(0, 1)
