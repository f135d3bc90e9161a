"""Softmax attention to all tokens, earlier and later ones, as encoders have it: PyTorch's kernels.

Packed documents are not padded and cost no mask over all pairs of tokens: a kernel takes them as
they lie, or those of equal length are computed together (grouped launches).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.nn.causal_attention import causal_attention
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


class Run(NamedTuple):
    """Consecutive queries of one document, and the consecutive keys that the last of them sees;
    counted over all samples."""

    queries: range
    keys: range


def attention_by_length(q: Tensor, k: Tensor, v: Tensor, packed: Packed, *, causal: bool) -> Tensor:
    """Attention inside documents, one call for all those of equal length. Causal: queries are those
    of all tokens."""
    return attention_of_runs(q, k, v, _documents(packed, k.shape[1]), causal=causal)


def attention_of_runs(
    q: Tensor, k: Tensor, v: Tensor, runs: Iterable[Run], *, causal: bool
) -> Tensor:
    """Attention of runs, which are all queries, one call for all those as long as each other in
    queries and in keys. Causal: queries are the last of the keys."""
    rows, keys, values = (x.flatten(0, 1) for x in (q, k, v))  # [tokens, heads, d_head]
    alike = defaultdict[tuple[int, int], list[Run]](list)
    for run in runs:
        alike[len(run.queries), len(run.keys)].append(run)
    found, places = [], []
    for some in alike.values():
        mine, seen = (
            torch.tensor([[*each] for each in of], device=q.device)
            for of in zip(*some, strict=True)
        )
        found.append(_of_equal(rows[mine], keys[seen], values[seen], causal=causal).flatten(0, 1))
        places.append(mine.flatten())
    order = torch.cat(places).argsort()
    return torch.cat(found)[order].view(q.shape)


def _documents(packed: Packed, num_keys: int) -> Iterator[Run]:
    """Each a run."""
    ends, query = packed.ends, 0
    for sample, (firsts, lasts) in enumerate(zip(packed.first.cpu(), ends.cpu(), strict=True)):
        begins, queries = firsts.unique_consecutive(return_counts=True)
        of_each = lasts[queries.cumsum(0) - 1]
        for begin, end, many in zip(*(x.tolist() for x in (begins, of_each, queries)), strict=True):
            keys = range(sample * num_keys + begin, sample * num_keys + end)
            yield Run(range(query, query + many), keys)
            query += many


def _of_equal(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Causal: queries are the last of the keys."""
    if causal and q.shape[1] != k.shape[1]:
        return causal_attention(q, k, v, None)
    return _fused(q, k, v, causal=causal)


def _fused(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),  # [batch, heads, seq, d_head]
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=causal,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return mixed.transpose(1, 2)
