"""Dropout whose mask is a function of seed, step, sample, site and place: of nothing else.

Integer operations only, so every device drops the same elements, whoever computes the sample,
and a block computed again in the backward pass drops them again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MASK_64 = (1 << 64) - 1


def dropout_keys(seed: int, step: int, samples: Tensor) -> Tensor:
    """A key for each sample of one step: ``samples`` ``[batch]`` int64 to ``[batch]`` int64."""
    base = _mix_int(_mix_int(seed) ^ step)
    return _mix(_mix(samples.long()) ^ _signed(base, 64))


class Dropout(nn.Module):
    """Drops elements of the residual stream; ``site`` numbers the places of a model that do."""

    def __init__(self, rate: float, site: int) -> None:
        super().__init__()
        assert 0 <= rate < 1, f"dropout rate {rate}"
        self.rate = rate
        self.site = site

    def forward(self, x: Tensor, keys: Tensor | None, positions: Tensor) -> Tensor:
        """``x`` ``[batch, seq, d_model]``, each element kept (and scaled) or zeroed.

        ``keys`` ``[batch]`` from ``dropout_keys``, None: ``x`` itself; ``positions`` int64
        ``[batch or 1, seq]``, the place of each token in its sample.
        """
        if keys is None or not self.rate:
            return x
        bits = element_bits(keys, self.site, positions, x.shape[-1])
        kept = bits >= round(self.rate * (1 << 31))
        return torch.where(kept, x * (1 / (1 - self.rate)), 0)


def element_bits(keys: Tensor, site: int, positions: Tensor, d_model: int) -> Tensor:
    """31 random bits for each element: int32 ``[batch, seq, d_model]``, never negative.

    64 bits of sample, site and position are mixed once a token, then 32 bits an element.
    """
    tokens = _mix(_mix(keys + _signed(_mix_int(site), 64))[:, None] ^ positions)  # [batch, seq]
    low, high = tokens.to(torch.int32)[..., None], (tokens >> 32).to(torch.int32)[..., None]
    features = torch.arange(d_model, device=keys.device, dtype=torch.int32)
    x = features * _signed(0x9E3779B1, 32) ^ low
    x = (x ^ _shifted(x, 16)) * _signed(0x85EBCA6B, 32) + high
    x = (x ^ _shifted(x, 13)) * _signed(0xC2B2AE35, 32)
    return (x ^ _shifted(x, 16)) & 0x7FFFFFFF


def _mix(x: Tensor) -> Tensor:
    """The finalizer of splitmix64 on int64, modulo 2^64."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB, 64)
    return x ^ _shifted(x, 31)


def _mix_int(x: int) -> int:
    """The finalizer of splitmix64, after a step of its sequence: 0 does not stay 0."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def _shifted(x: Tensor, places: int) -> Tensor:
    """Right, filling with zeros: PyTorch's shift fills with the sign."""
    return (x >> places) & ((1 << (torch.iinfo(x.dtype).bits - places)) - 1)


def _signed(value: int, width: int) -> int:
    """The signed integer with the bits of an unsigned one."""
    return value - (1 << width) if value >> (width - 1) else value
