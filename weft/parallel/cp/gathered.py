"""Attention of this rank's queries to keys and values that are gathered (as in the training of
Llama 3, arXiv 2407.21783), for kernels that give no logarithms of sums.

Where ranks have tokens by the work of documents, those of a document are a few runs of consecutive
ones. Each run is a sequence of its own with the keys that it sees, which are there for each run
that sees them. A document has a run from the start and one as far from the end, so these are hardly
more keys than one sample has.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from weft.axes.held import Ranges
from weft.nn.causal_attention import causal_attention
from weft.nn.documents import Packed
from weft.nn.full_attention import Run, attention_of_runs, full_attention
from weft.nn.moved import moved
from weft.parallel.division import Division
from weft.parallel.runtime import Lying, Sum
from weft.plan.layout import Shard
from weft.platform.upload import upload


class Gathered:
    """Attention of this rank's queries to the keys and values of all ranks."""

    def __init__(self, total: Sum, *, causal: bool) -> None:
        self._causal = causal
        self._own = total.parts[total.group.position]
        self._keys = Division(total.group, Lying(Shard(1), total.parts), ("keys", "keys"))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed | None) -> Tensor:
        """``q`` and the result ``[batch, own seq, heads, d_head]``, ``k`` and ``v`` likewise."""
        whole = self._keys.gather(torch.cat((k, v), dim=3))  # [batch, seq, kv_heads, both widths]
        widths = [k.shape[3], v.shape[3]]
        if packed is not None and packed.places is not None:
            return self._by_run(q, whole, widths, packed)
        keys, values = torch.split(whole, widths, dim=3)
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

    def _by_run(self, q: Tensor, whole: Tensor, widths: list[int], packed: Packed) -> Tensor:
        assert packed.host is not None, packed
        runs = Runs.of(packed.host, self._own, causal=self._causal)
        order, rows = (upload(x, q.device) for x in (runs.order, runs.rows))
        seen = whole.flatten(0, 1).index_select(0, rows)[None]  # [1, keys, kv_heads, both widths]
        keys, values = torch.split(seen, widths, dim=3)
        mine = moved(q, order)
        found = attention_of_runs(mine, keys, values, runs.each(), causal=self._causal)
        return moved(found, order.argsort(dim=1))


class Runs(NamedTuple):
    """A rank's tokens in runs, each of one document, and the keys that these see; on the host."""

    order: Tensor
    """``[batch, own seq]``: the slot of each token among the rank's, by tokens ascending."""
    borders: Tensor
    """``[runs + 1]``: where runs begin in that order of all samples, and the end."""
    rows: Tensor
    """``[keys]``: which slot of all samples has each key, run by run."""
    key_borders: Tensor
    """``[runs + 1]``: where the keys of runs begin among those, and the end."""

    @staticmethod
    def of(packed: Packed, slots: Ranges, *, causal: bool) -> Runs:
        """Both ways a document is one run, for its queries see the same keys."""
        places = packed.places
        assert places is not None, packed
        (batch, seq), own = places.shape, sum(map(len, slots))
        tokens, order = tokens_in(places, slots).sort(dim=1)
        first = packed.first.gather(1, tokens).long()
        begins = torch.ones_like(tokens, dtype=torch.bool)
        begins[:, 1:] = first[:, 1:] != first[:, :-1]
        if causal:
            begins[:, 1:] |= tokens[:, 1:] != tokens[:, :-1] + 1
        starts = begins.flatten().nonzero()[:, 0]
        borders = torch.cat((starts, starts.new_tensor([batch * own])))
        ends = tokens + 1 if causal else packed.ends.gather(1, tokens).long()
        low, high = first.flatten()[starts], ends.flatten()[borders[1:] - 1]
        key_borders = torch.cat((starts.new_zeros(1), (high - low).cumsum(0)))
        sample = torch.div(starts, own, rounding_mode="floor") * seq
        key = (low + sample - key_borders[:-1]).repeat_interleave(high - low)
        key += torch.arange(len(key))
        slot_of = places.argsort(dim=1) + seq * torch.arange(batch)[:, None]
        return Runs(order, borders, slot_of.flatten()[key], key_borders)

    def each(self) -> list[Run]:
        """One by one."""
        both = (pairwise(x.tolist()) for x in (self.borders, self.key_borders))
        return [Run(range(*mine), range(*seen)) for mine, seen in zip(*both, strict=True)]


def tokens_in(places: Tensor, slots: Ranges) -> Tensor:
    """Which tokens ``[batch, n]`` of each sample a rank has in its slots."""
    return torch.cat([places[:, part.start : part.stop] for part in slots], dim=1)
