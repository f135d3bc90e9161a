"""Numbers in eight bits, and what they were scaled by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.parallel.fp8.fused import compiled, contiguous, in_three

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
    fused: bool = False,
) -> Scaled:
    """Round to eight bits, each part of ``spans`` with its own scale.

    Args:
        combine: Where other ranks hold some of what has one scale.
        fused: By compiled passes, to the same bits; blocks are not.
    """
    largest = largest_of(x, spans, block, fused=fused)
    if combine is not None:
        largest = combine(largest)
    scale = scale_of(largest, dtype, fused=fused and not spans.blocks)
    if fused and not spans.blocks and x.numel():
        values = compiled(_times, *_parts(x, scale, spans.whole), dtype)
        return Scaled(values.view(x.shape), scale)
    for dim in spans.blocks:
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, x.shape[dim])
    return Scaled(_times(x, scale, dtype), scale)


def largest_of(x: Tensor, spans: Spans, block: int = 128, *, fused: bool = False) -> Tensor:
    """The largest magnitude of each part."""
    if fused and not spans.blocks and x.numel():
        sizes = [1 if dim in spans.whole else size for dim, size in enumerate(x.shape)]
        return compiled(_largest, in_three(x, spans.whole)).view(sizes)
    largest = x.detach().abs()
    for dim in spans.blocks:
        largest = _largest_of_blocks(largest, dim, block)
    return largest.amax(spans.whole, keepdim=True) if spans.whole else largest


def rounded(
    x: Tensor, scale: Tensor, dtype: torch.dtype, spans: Spans, *, fused: bool = False
) -> Scaled:
    """Round with scales that may be of other numbers: what is too large becomes the largest that
    there is, and what is not finite no number, so that the loss says so."""
    if fused and x.numel():
        parts = _parts(x, scale, spans.whole)
        return Scaled(compiled(_times_within, *parts, dtype).view(x.shape), scale)
    return Scaled(_times_within(x, scale, dtype), scale)


def _parts(x: Tensor, scale: Tensor, along: Sequence[int]) -> tuple[Tensor, Tensor]:
    return in_three(x, along), in_three(scale, along)


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax(1)


def _times(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * scale.to(x.dtype)).to(dtype)


def _times_within(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    values = (x * scale.to(x.dtype)).clamp(-most, most)
    return values.masked_fill(~x.isfinite(), math.nan).to(dtype)


def scale_of(largest: Tensor, dtype: torch.dtype, *, fused: bool) -> Tensor:
    """``scale_for``, by a compiled pass if asked."""
    if fused and largest.numel():
        return compiled(scale_for, largest.flatten(), dtype).view(largest.shape)
    return scale_for(largest, dtype)


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


def product(
    left: Scaled,
    right: Scaled,
    dtype: torch.dtype,
    *,
    by_tensor_cores: bool,
    fused: bool = False,
) -> Tensor:
    """``[.., k]`` times ``[n, k]`` transposed, of what was rounded to, in ``dtype``.

    ``by_tensor_cores``: by PyTorch's product of numbers in eight bits where it can be, which are
    results in bf16, sizes of whole 16 elements and scales that are the same along ``k``. The
    numbers are the same but for the order of sums. ``fused``: what is turned by compiled passes.
    """
    if by_tensor_cores and dtype == torch.bfloat16 and can_multiply(left, right):
        return _by_tensor_cores(left, right, dtype, fused=fused)
    return left.exact(dtype) @ right.exact(dtype).T


def can_multiply(left: Scaled, right: Scaled) -> bool:
    """Of ``[.., k]`` and ``[.., n, k]``."""
    sizes: Sequence[int] = (left.values.shape[-1], right.values.shape[-2])
    along = left.scale.shape[-1] == 1 == right.scale.shape[-1]
    return along and all(size % 16 == 0 for size in sizes) and left.values.numel() > 0


def _by_tensor_cores(left: Scaled, right: Scaled, dtype: torch.dtype, *, fused: bool) -> Tensor:
    """It gives the product itself, a tensor, not a tuple."""
    ordered = contiguous if fused else Tensor.contiguous
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
    columns = ordered(right.values).T
    made: Tensor = torch._scaled_mm(ordered(rows), columns, *scales, out_dtype=dtype)
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
