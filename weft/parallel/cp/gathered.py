"""Attention of this rank's queries to keys and values that are gathered (as in the training of
Llama 3, arXiv 2407.21783), for PyTorch's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.nn.causal_attention import causal_attention
from weft.nn.documents import Packed
from weft.nn.full_attention import full_attention
from weft.parallel.division import Division
from weft.parallel.runtime import Lying, Sum
from weft.plan.layout import Shard


class Gathered:
    """Attention of this rank's queries to the keys and values of all ranks."""

    def __init__(self, total: Sum, *, causal: bool) -> None:
        self._causal = causal
        self._own = total.parts[total.group.position]
        self._keys = Division(total.group, Lying(Shard(1), total.parts), ("keys", "keys"))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed | None) -> Tensor:
        """``q`` and the result ``[batch, own seq, heads, d_head]``, ``k`` and ``v`` likewise."""
        whole = self._keys.gather(torch.cat((k, v), dim=3))  # [batch, seq, kv_heads, both widths]
        keys, values = torch.split(whole, [k.shape[3], v.shape[3]], dim=3)
        if not self._causal:
            return full_attention(
                q, keys, values, None if packed is None else packed.those(self._own)
            )
        parts = torch.split(q, [len(part) for part in self._own], dim=1)
        return torch.cat(
            [
                causal_attention(
                    mine,
                    keys[:, : part.stop],
                    values[:, : part.stop],
                    None if packed is None else packed.ending(part),
                )
                for part, mine in zip(self._own, parts, strict=True)
            ],
            dim=1,
        )
