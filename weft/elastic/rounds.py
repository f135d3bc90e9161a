"""Measure attention whose keys go round ranks, each by what it computes itself.

It is slower than attention to keys that are all there: a rank meets them in parts, and makes one
result of what came of each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch
from torch import Tensor

from weft.axes.registry import AXES
from weft.cluster.cluster import Dtype
from weft.comm.address import RankAddress
from weft.comm.join import join
from weft.cost.profile import AttentionTime
from weft.elastic.measure import TORCH_DTYPE
from weft.nn.rope import rotate, rotation
from weft.parallel.cp.ring import Ring
from weft.parallel.runtime import AxisGroup, Sum
from weft.plan.layout import Dim
from weft.platform.registry import platform_named

TOKENS = (128, 256, 512, 1024, 2048)
"""Of one of two ranks."""
HEADS, KV_HEADS, D_HEAD = 4, 2, 64
REPEATS = 7


def measure_rounds(
    address: RankAddress, device: str, dtypes: Sequence[Dtype], quick: bool
) -> list[AttentionTime]:
    """Of this rank, one of two."""
    platform = platform_named(device)
    where = platform.device(address.local_rank)
    comm = join(address, device=where, **platform.joining())
    found = []
    for tokens in TOKENS[:2] if quick else TOKENS:
        dim = Dim(name="seq", size=2 * tokens)
        parts = tuple(AXES["cp"].part(dim, 2, position) for position in range(2))
        total = Sum(AxisGroup(comm, comm.world), parts[comm.rank], parts, None)
        for dtype in dtypes:
            attend = Ring(total, causal=True)
            own = torch.cat([torch.arange(part.start, part.stop) for part in attend.own])
            times = [*_times(attend, own[None].to(where), dtype)]
            forward, backward = (median(each) for each in zip(*times[2:], strict=True))
            flops = 2 * tokens * tokens * 2 * D_HEAD * HEADS * _batch(tokens)
            found.append(
                AttentionTime(dtype, tokens, 2 * D_HEAD, forward / flops, backward / flops)
            )
    comm.close()
    return found


def _batch(tokens: int) -> int:
    return max(1, 512 // tokens)


def _times(attend: Ring, positions: Tensor, dtype: Dtype) -> Iterator[tuple[float, float]]:
    """Forward and backward, with rotations."""
    kind, tokens = TORCH_DTYPE[dtype], positions.shape[1]
    q, k, v = (
        torch.full(
            (_batch(tokens), tokens, heads, D_HEAD), 0.01, dtype=kind, device=positions.device
        ).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    turn = rotation(positions, D_HEAD, theta=1e4, scaling=None, dtype=kind)
    for _ in range(REPEATS):
        start = time.thread_time()
        result = attend(rotate(q, turn), rotate(k, turn), v, None)
        between = time.thread_time()
        torch.autograd.grad(result, (q, k, v), torch.ones_like(result))
        yield between - start, time.thread_time() - between
