"""Rotary position embedding (arXiv 2104.09864), halves rotated as Hugging Face's Llama does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.nn.rope_scaling import sharpness, stretched
from weft.plan.model import RopeScaling

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines, each ``[batch or 1, seq, 1, d_head]``: see ``rotate``."""


def rotation(
    positions: Tensor,
    d_head: int,
    *,
    theta: float,
    scaling: RopeScaling | None,
    dtype: torch.dtype,
    length: int = 0,
) -> Rotation:
    """Angles of ``positions`` ``[batch or 1, seq]``, computed in fp32, in fp64 for fp64.

    Made once a forward pass, of the positions that are there and no others, and handed to every
    layer. The result has ``dtype``, that of the activations it will turn. ``length``: tokens of a
    whole sample, which a scaling may depend on.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, d_head, 2, device=positions.device).to(exact) / d_head
    frequency = 1.0 / theta**exponent
    if scaling is not None:
        frequency = stretched(frequency, scaling, theta=theta, length=length)
    angle = (positions.to(exact)[..., None] * frequency)[:, :, None]  # [batch, seq, 1, d_head / 2]
    size = sharpness(scaling)
    cos, sin = (angle.cos() * size).to(dtype), (angle.sin() * size).to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class Rotary(nn.Module):
    """``rotation`` as a module, so that a layout can say of which positions."""

    def __init__(self, d_head: int, *, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        self._d_head, self._theta, self._scaling = d_head, theta, scaling

    def forward(self, positions: Tensor, dtype: torch.dtype, length: int) -> Rotation:
        """As the function. ``positions`` may be a part of a sample's, ``length`` is of all."""
        return rotation(
            positions,
            self._d_head,
            theta=self._theta,
            scaling=self._scaling,
            dtype=dtype,
            length=length,
        )


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    """Turn each pair ``(x[i], x[i + d_head / 2])`` of ``x`` ``[batch, seq, heads, d_head]``.

    The first of a pair becomes ``a cos - b sin``, the second ``b cos + a sin``: swap the halves,
    and let the sines carry the sign.
    """
    cos, signed_sin = turn
    swapped = torch.roll(x, x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, signed_sin)
