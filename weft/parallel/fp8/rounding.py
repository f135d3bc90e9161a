"""Numbers in eight bits, and what they were scaled by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_BIAS, _MANTISSA = 127, 23
"""Of fp32: what is added to an exponent, and the bits after it."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """Numbers times powers of two, rounded."""

    values: Tensor
    """In eight bits."""
    scale: Tensor
    """fp32, as many dimensions, and along each as many elements as ``values`` or one."""

    def exact(self, dtype: torch.dtype) -> Tensor:
        """The numbers that were rounded to, with no rounding more: a power of two leaves all bits
        in every dtype that has the exponents of bfloat16."""
        return self.values.to(dtype) / self.scale.to(dtype)


@dataclass(frozen=True, slots=True)
class Spans:
    """What numbers have one scale: all along some dimensions, and blocks along others."""

    whole: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()


Combine = Callable[[Tensor], Tensor]
"""From the largest magnitudes that a rank sees to those that all ranks see that hold a part."""


def scaled(
    x: Tensor,
    dtype: torch.dtype,
    spans: Spans,
    *,
    block: int = 128,
    combine: Combine | None = None,
) -> Scaled:
    """Round to eight bits, each part of ``spans`` with its own scale.

    Args:
        combine: Where other ranks hold some of what has one scale.
    """
    largest = largest_of(x, spans, block)
    if combine is not None:
        largest = combine(largest)
    scale = scale_for(largest, dtype)
    for dim in spans.blocks:
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, x.shape[dim])
    return Scaled((x * scale.to(x.dtype)).to(dtype), scale)


def largest_of(x: Tensor, spans: Spans, block: int = 128) -> Tensor:
    """The largest magnitude of each part."""
    largest = x.detach().abs()
    for dim in spans.blocks:
        largest = _largest_of_blocks(largest, dim, block)
    return largest.amax(spans.whole, keepdim=True) if spans.whole else largest


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Scaled:
    """Round with a scale that may be of other numbers: what is too large becomes the largest that
    there is, and what is not finite no number, so that the loss says so."""
    most = torch.finfo(dtype).max
    values = (x * scale.to(x.dtype)).clamp(-most, most).masked_fill(~x.isfinite(), math.nan)
    return Scaled(values.to(dtype), scale)


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The greatest power of two that takes ``largest`` to no more than ``dtype`` has, in fp32.

    1 for zero; for what is not finite no number, so that the loss says so: eight bits would make
    448 of infinity. From the bits, so that all devices agree.
    """
    fraction, exponent = math.frexp(torch.finfo(dtype).max)
    most = int((2 * fraction - 1) * (1 << _MANTISSA))
    largest = largest.float()
    bits = largest.view(torch.int32)
    above = (bits & ((1 << _MANTISSA) - 1)) > most
    power = exponent - 1 - ((bits >> _MANTISSA) - _BIAS) - above.int()
    power = power.clamp(1 - _BIAS, _BIAS - 1).masked_fill(largest == 0, 0)
    scale = ((power + _BIAS) << _MANTISSA).view(torch.float32)
    return scale.masked_fill(~largest.isfinite(), math.nan)


def _largest_of_blocks(x: Tensor, dim: int, block: int) -> Tensor:
    lacking = -x.shape[dim] % block
    padding = [0, 0] * (x.dim() - 1 - dim) + [0, lacking]
    padded = F.pad(x, padding)
    before, after = padded.shape[:dim], padded.shape[dim + 1 :]
    return padded.reshape(*before, padded.shape[dim] // block, block, *after).amax(dim + 1)


def product(left: Scaled, right: Scaled, dtype: torch.dtype, *, by_tensor_cores: bool) -> Tensor:
    """``[.., k]`` times ``[n, k]`` transposed, of what was rounded to, in ``dtype``.

    ``by_tensor_cores``: by PyTorch's product of numbers in eight bits where it can be, which are
    results in bf16, sizes of whole 16 elements and scales that are the same along ``k``. The
    numbers are the same but for the order of sums.
    """
    if by_tensor_cores and dtype == torch.bfloat16 and can_multiply(left, right):
        return _by_tensor_cores(left, right, dtype)
    return left.exact(dtype) @ right.exact(dtype).T


def can_multiply(left: Scaled, right: Scaled) -> bool:
    """Of ``[.., k]`` and ``[.., n, k]``."""
    sizes: Sequence[int] = (left.values.shape[-1], right.values.shape[-2])
    along = left.scale.shape[-1] == 1 == right.scale.shape[-1]
    return along and all(size % 16 == 0 for size in sizes) and left.values.numel() > 0


def _by_tensor_cores(left: Scaled, right: Scaled, dtype: torch.dtype) -> Tensor:
    """It gives the product itself, a tensor, not a tuple."""
    *outside, k = left.values.shape
    rows = left.values.reshape(-1, k)
    scales = left.scale.reciprocal(), right.scale.reciprocal()
    if any(scale.numel() > 1 for scale in scales):  # one for every row of each, or one for all
        scales = (
            scales[0].expand(*outside, 1).reshape(-1, 1).contiguous(),
            scales[1].expand(len(right.values), 1).T.contiguous(),
        )
    else:
        scales = scales[0].reshape(()), scales[1].reshape(())
    columns = right.values.contiguous().T
    made: Tensor = torch._scaled_mm(rows.contiguous(), columns, *scales, out_dtype=dtype)
    return made.reshape(*outside, len(right.values))


def grouped_by_tensor_cores(
    rows: Scaled, matrices: Scaled, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """``[rows, k]`` times that of ``[experts, n, k]``, transposed, which a row belongs to; rows end
    with their expert's of ``ends``. Each row and each column has a scale."""
    scales = rows.scale.reciprocal(), matrices.scale.reciprocal()
    made: Tensor = torch._scaled_grouped_mm(
        rows.values.contiguous(),
        matrices.values.contiguous().mT,
        scales[0].reshape(-1),
        scales[1].expand(-1, matrices.values.shape[1], 1).squeeze(-1).contiguous(),
        offs=ends,
        out_dtype=dtype,
    )
    return made
