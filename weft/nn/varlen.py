"""PyTorch's kernel for sequences of unequal lengths, where this device and version have it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.nn.documents import Packed

HALVES = (torch.float16, torch.bfloat16)
"""What the kernel computes with."""
MAX_D_HEAD = 256


def has_kernel(q: Tensor, packed: Packed) -> bool:
    """Queries like these have a kernel that takes documents as they lie one after the other."""
    fits = q.dtype in HALVES and q.shape[-1] <= MAX_D_HEAD and q.shape[-1] % 8 == 0
    return packed.borders is not None and fits and _kernel() is not None


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, *, causal: bool = True
) -> Tensor:
    """Attention inside each document; shapes as of ``causal_attention``. The kernel has one width
    for all: narrower values get channels of zeros there."""
    kernel = _kernel()
    assert kernel is not None, "callers ask has_kernel first"
    call, told_causal, shares_keys = kernel
    if q.shape[2] != k.shape[2] and not shares_keys:
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    more = {"enable_gqa": q.shape[2] != k.shape[2]} if shares_keys else {}
    more = {**more, **told_causal} if causal else more
    padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    rows = (x.flatten(0, 1) for x in (q, k, padded))  # [tokens, heads, d_head]
    borders, longest = packed.borders, q.shape[1]  # the true length would be asked of the device
    mixed: Tensor = call(*rows, borders, borders, longest, longest, **more)
    return mixed.view(q.shape)[..., : v.shape[-1]]


@cache
def _kernel() -> tuple[Callable[..., Any], Mapping[str, Any], bool] | None:
    """The call, how it is told to be causal, and whether queries may share keys in it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # PyTorch without it
        return None
    takes = inspect.signature(varlen_attn).parameters  # they differ between 2.11 and 2.15
    causal = {"is_causal": True} if "is_causal" in takes else {"window_size": (-1, 0)}
    return varlen_attn, causal, "enable_gqa" in takes
