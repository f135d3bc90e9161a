"""Softmax attention to all tokens, earlier and later ones, as encoders have it: PyTorch's kernels.

Packed documents are not padded and cost no mask over all pairs of tokens: a kernel takes them as
they lie, or those of equal length are computed together (grouped launches).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.nn.documents import Packed
from weft.nn.moved import in_order
from weft.nn.varlen import has_kernel, packed_attention


def full_attention(q: Tensor, k: Tensor, v: Tensor, packed: Packed | None) -> Tensor:
    """``softmax(q k^T / sqrt(d_head)) v`` over all keys of each query's document.

    Shapes as of ``causal_attention``. Where queries are not those of all tokens, ``packed`` is
    ``Packed.those``'s.
    """
    if packed is None:
        return _fused(q, k, v)
    if packed.places is not None:
        return in_order(full_attention, (q, k, v), packed)
    if has_kernel(q, packed):
        return packed_attention(q, k, v, packed, causal=False)
    return attention_by_length(q, k, v, packed, causal=False)


def attention_by_length(q: Tensor, k: Tensor, v: Tensor, packed: Packed, *, causal: bool) -> Tensor:
    """Attention inside documents, one call for all those of equal length. Causal: queries are those
    of all tokens."""
    rows, keys, values = (x.flatten(0, 1) for x in (q, k, v))  # [tokens, heads, d_head]
    found, places = [], []
    for queries, others in _alike(packed, k.shape[1]):
        mine, seen = queries.to(q.device), others.to(q.device)
        found.append(_fused(rows[mine], keys[seen], values[seen], causal=causal).flatten(0, 1))
        places.append(mine.flatten())
    order = torch.cat(places).argsort()
    return torch.cat(found)[order].view(q.shape)


def _alike(packed: Packed, num_keys: int) -> Iterator[tuple[Tensor, Tensor]]:
    """By lengths: of documents that have as many queries and as many keys, the numbers of both
    ``[documents, ..]``, counted over all samples."""
    found = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    ends = packed.ends
    for sample, (firsts, lasts) in enumerate(zip(packed.first.cpu(), ends.cpu(), strict=True)):
        begins, queries = firsts.unique_consecutive(return_counts=True)
        query = sample * len(firsts)
        of_each = lasts[queries.cumsum(0) - 1]
        for begin, end, many in zip(*(x.tolist() for x in (begins, of_each, queries)), strict=True):
            found[many, end - begin].append((query, sample * num_keys + begin))
            query += many
    for (queries_each, keys_each), starts in found.items():
        of_queries, of_keys = torch.tensor(starts).unbind(1)
        yield (
            of_queries[:, None] + torch.arange(queries_each),
            of_keys[:, None] + torch.arange(keys_each),
        )


def _fused(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),  # [batch, heads, seq, d_head]
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=causal,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return mixed.transpose(1, 2)
