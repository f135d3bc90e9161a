"""Tokens that are computed in another order than that of their sample."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.nn.documents import Packed


def moved(x: Tensor, order: Tensor) -> Tensor:
    """``x`` ``[batch, seq, ..]`` with the token ``order[b, n]`` as the n-th: ``[batch, n, ..]``."""
    first = torch.arange(len(x), device=x.device)[:, None] * x.shape[1]
    rows = x.flatten(0, 1).index_select(0, (order + first).flatten())
    return rows.view(*order.shape, *x.shape[2:])


def in_order(
    attend: Callable[[Tensor, Tensor, Tensor, Packed | None], Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    packed: Packed,
) -> Tensor:
    """Attention of all tokens, which knows only samples in their order."""
    assert packed.places is not None, packed
    order = packed.places.argsort(dim=1)
    q, k, v = (moved(x, order) for x in inputs)
    return moved(attend(q, k, v, packed._replace(places=None)), packed.places)
