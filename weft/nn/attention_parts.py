"""Attention of some queries to some keys at a time, put together as more keys come.

Softmax online (arXiv 1805.02867, 2310.01889): of each query the greatest score so far, the sum of
exponentials against it, and the values added up with them, in fp32 or fp64. Backward makes the
probabilities again from the logarithms of the sums. In blocks of queries, as on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.nn.causal_attention import BLOCK_QUERIES, add_product
from weft.nn.documents import Packed
from weft.nn.norm import wide_dtype

BLOCK_SCORES = BLOCK_QUERIES * 1024
"""Of a head, at once: where nothing is hidden few keys meet more queries, for small products are
slow."""
BLOCK_KEYS = 512
"""At most at once, so that a core's cache holds the scores of some heads, whatever the length."""


_APART = BLOCK_QUERIES
"""Keys that nobody sees and that are more to compute than another block."""


class Sight(NamedTuple):
    """Which keys each of some queries sees: those from one place up to another."""

    first: Tensor | None
    """``[batch, queries]``: the place of the first; None: that of the sample."""
    end: Tensor | None
    """``[batch or 1, queries]``: one past that of the last; None: all of the sample."""

    @staticmethod
    def of(q: Tensor, packed: Packed | None, places: Sequence[range], *, causal: bool) -> Sight:
        """Of queries ``[batch, queries, ..]`` in these places of samples, and of the documents of
        whole samples."""

        def own(x: Tensor) -> Tensor:
            return torch.cat([x[:, part.start : part.stop] for part in places], dim=1)

        first = None if packed is None else own(packed.first)
        if causal:
            after = [torch.arange(p.start + 1, p.stop + 1, device=q.device) for p in places]
            return Sight(first, torch.cat(after)[None])
        return Sight(first, None if packed is None else own(packed.ends))

    @staticmethod
    def moved(packed: Packed, tokens: Tensor, *, causal: bool) -> Sight:
        """Of queries that are these tokens ``[batch, queries]`` of their samples."""
        first = packed.first.gather(1, tokens).long()
        return Sight(first, tokens + 1 if causal else packed.ends.gather(1, tokens).long())

    def among(self, tokens: Tensor) -> Sight:
        """The same by number among keys that are these tokens ``[batch, keys]``, ascending."""
        first, end = (
            None if x is None else torch.searchsorted(tokens, x.contiguous()) for x in self
        )
        return Sight(first, end)

    def split(self, sizes: Sequence[int]) -> list[Sight]:
        """Of so many consecutive ones each."""
        firsts, ends = (
            [None] * len(sizes) if x is None else torch.split(x, list(sizes), dim=1) for x in self
        )
        return [Sight(first, end) for first, end in zip(firsts, ends, strict=True)]

    def sees_all(self, rows: slice, keys: range) -> bool:
        """Whether each of some queries sees all keys in these places, which never go back."""
        first, end = (None if x is None else x[:, rows] for x in self)
        from_first = first is None or int(first[:, -1].max()) <= keys.start
        return from_first and (end is None or keys.stop <= int(end[:, 0].min()))

    def hidden(self, rows: slice, keys: range) -> Tensor | None:
        """``[batch or 1, rows, keys]``: what some of the queries do not see of keys in these
        places; None: they see all."""
        first, end = (None if x is None else x[:, rows, None] for x in self)
        if end is None or self.sees_all(rows, keys):
            return None
        places = torch.arange(keys.start, keys.stop, device=end.device)
        hidden = places >= end
        return hidden if first is None else hidden | (places < first)

    def hides(self, tokens: Tensor) -> Tensor:
        """``[batch, queries, keys]``: what queries do not see of keys that are these tokens
        ``[batch, keys]`` of their samples."""
        first, end, keys = self.first, self.end, tokens[:, None]
        assert first is not None and end is not None, self
        return (keys >= end[..., None]) | (keys < first[..., None])


class Keys(NamedTuple):
    """Keys and values ``[n, keys, d_head]`` of consecutive places of every sample, where
    ``n = batch * kv_heads``; or their gradients. Values may have another width."""

    places: range
    k: Tensor
    v: Tensor


class Gradients(NamedTuple):
    """What backward knows of queries, and what it adds up; of wide dtypes but for the first."""

    d_result: Tensor
    """``[n, group, seq, d_head]``."""
    log_sum: Tensor
    """``[n, group, seq]``, the result's."""
    delta: Tensor
    """``[n, group, seq]``: the sum of ``d_result`` times the result over ``d_head``."""
    d_q: Tensor


class Queries:
    """Queries of consecutive places of every sample, and what they have seen so far.

    Args:
        q: ``[n, group, seq, d_head]``: those that share a key head are rows of one product.
        d_value: Width of the values.

    What they see is said beside keys, by the places of these.
    """

    def __init__(self, q: Tensor, d_value: int) -> None:
        self.q = q
        self._scale = q.shape[-1] ** -0.5
        wide = wide_dtype(q)
        self._total = q.new_zeros((*q.shape[:-1], d_value), dtype=wide)
        self._most = q.new_full(q.shape[:-1], torch.finfo(wide).min, dtype=wide)
        self._sum = torch.zeros_like(self._most)

    def see(self, keys: Keys, sight: Sight) -> None:
        """Some more keys, of which some may come after these queries, or be of other documents."""
        for rows, seen in self._blocks(keys.places, sight):
            q, total = _flat(self.q[:, :, rows]), self._total[:, :, rows]
            most, sums = self._most[:, :, rows], self._sum[:, :, rows]
            for some in _pieces(seen):
                scores = self._scores(q, rows, keys, some, sight)
                greatest = torch.maximum(most, scores.amax(-1))
                weights = scores.sub_(greatest[..., None]).exp_()
                less = (most - greatest).exp_()
                most.copy_(greatest)
                sums.mul_(less).add_(weights.sum(-1))
                mixed = torch.bmm(_flat(weights.to(keys.v.dtype)), keys.v[:, some])
                total.mul_(less[..., None]).add_(mixed.view_as(total))

    def result(self) -> tuple[Tensor, Tensor]:
        """What they made of the values, and the logarithms of the sums ``[n, group, seq]``."""
        mixed = self._total / self._sum[..., None]
        return mixed.to(self.q.dtype), self._most + self._sum.log()

    def gradients(self, keys: Keys, sight: Sight, so_far: Gradients, d_keys: Keys) -> None:
        """Add gradients of some keys and values to ``d_keys``, and theirs to ``so_far``."""
        for rows, seen in self._blocks(keys.places, sight):
            d_rows, q = _flat(so_far.d_result[:, :, rows]), _flat(self.q[:, :, rows])
            log_sum, delta = (x[:, :, rows, None] for x in (so_far.log_sum, so_far.delta))
            d_q = torch.zeros_like(q, dtype=so_far.d_q.dtype)
            for some in _pieces(seen):
                p = self._scores(q, rows, keys, some, sight).sub_(log_sum).exp_()
                add_product(d_keys.v[:, some], _flat(p.to(d_rows.dtype)).mT, d_rows)
                d_p = torch.bmm(d_rows, keys.v[:, some].mT).view_as(p).to(p.dtype)
                d_p.sub_(delta).mul_(p)
                d_scores = _flat(d_p.to(q.dtype))
                add_product(d_q, d_scores, keys.k[:, some], self._scale)
                add_product(d_keys.k[:, some], d_scores.mT, q, self._scale)
            total = so_far.d_q[:, :, rows]
            total += d_q.view_as(total)

    def _blocks(self, places: range, sight: Sight) -> Iterator[tuple[slice, range]]:
        """Some of the queries, and those of the keys in ``places`` that some of them see."""
        first, end, seq = *sight, self.q.shape[2]
        at_once = BLOCK_QUERIES
        if places and sight.sees_all(slice(0, seq), places):
            at_once = max(at_once, BLOCK_SCORES // min(len(places), BLOCK_KEYS))
        runs = [range(seq)] if first is None or end is None else _runs(first, end, places)
        for some in (
            run[low : low + at_once] for run in runs for low in range(0, len(run), at_once)
        ):
            rows, low = slice(some.start, some.stop), some.start
            begin = 0 if first is None else int(first[:, low].min())
            last = places.stop if end is None else int(end[:, rows.stop - 1].max())
            seen = range(max(begin, places.start), min(places.stop, last))
            if seen:
                yield rows, range(seen.start - places.start, seen.stop - places.start)

    def _scores(self, q: Tensor, rows: slice, keys: Keys, seen: slice, sight: Sight) -> Tensor:
        """``[n, group, block, seen]``, in a wide dtype; of what they may not see minus infinity."""
        k = keys.k[:, seen]
        products = q.new_empty(*q.shape[:2], k.shape[1])
        products.baddbmm_(q, k.mT, beta=0, alpha=self._scale)
        group = self.q.shape[1]
        scores = products.view(len(q), group, -1, k.shape[1]).to(wide_dtype(q))
        first = keys.places.start
        hidden = sight.hidden(rows, range(first + seen.start, first + seen.stop))
        if hidden is not None:
            by_sample = scores.view(len(hidden), -1, *scores.shape[2:])
            by_sample.masked_fill_(hidden[:, None], -torch.inf)
        return scores


def _pieces(seen: range) -> Iterator[slice]:
    """Not more keys each than are met at once."""
    for start in range(seen.start, seen.stop, BLOCK_KEYS):
        yield slice(start, min(start + BLOCK_KEYS, seen.stop))


def _flat(x: Tensor) -> Tensor:
    """``[n, group, rows, ..]`` to ``[n, group * rows, ..]``."""
    return x.flatten(1, 2)


def _runs(first: Tensor, end: Tensor, places: range) -> list[range]:
    """Queries that see some of the keys in these places, cut where those of one and of the next are
    far apart: of documents that others are between."""
    begins = first.amin(0).clamp(min=places.start)
    stops = end.amax(0).clamp(max=places.stop).expand_as(begins)
    sees = begins < stops
    starts = sees.clone()
    starts[1:] &= ~sees[:-1] | (begins[1:] - stops[:-1] > _APART)
    ends = sees.clone()
    ends[:-1] &= ~sees[1:] | starts[1:]
    found = (x.nonzero()[:, 0].tolist() for x in (starts, ends))
    return [range(low, last + 1) for low, last in zip(*found, strict=True)]
