"""Attention of all positions to each other by some of the heads (DeepSpeed Ulysses, arXiv
2309.14509; segment parallelism).

Neighbouring ranks exchange positions of queries, keys and values for heads, all to all, and back
after attention. Among all ranks of the axis that leaves attention as on one rank. Among some, what
each group of neighbours has goes to the others in another way (two dimensions, arXiv 2406.18485).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from weft.axes.held import Ranges, joined
from weft.nn.documents import Packed
from weft.nn.norm import wide_dtype
from weft.parallel.division import there_and_back
from weft.parallel.runtime import Sum
from weft.plan.tiling import part_of

Attend = Callable[[Tensor, Tensor, Tensor, Packed | None], Tensor]
"""``[batch, seq, heads, d_head]`` queries, keys and values to what queries make of the values."""


class Ulysses:
    """Attention of this rank's queries to the keys and values of all ranks."""

    def __init__(self, total: Sum, attend: Attend) -> None:
        """``attend``: by this rank's heads, of all that its neighbours have."""
        self._group, self._attend = total.group.near, attend
        first = total.group.position - self._group.position
        self._held = total.parts[first : first + self._group.size]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed | None) -> Tensor:
        """``q`` and the result ``[batch, own seq, heads, d_head]``, ``k`` and ``v`` likewise. What
        is of another width goes by itself."""
        size, num, kv = self._group.size, q.shape[2], k.shape[2]
        heads = [_heads(num, kv, size, place) for place in range(size)]
        own, seen = heads[self._group.position]
        if v.shape[3] == q.shape[3]:
            each = [(a, _from(num, b), _from(num + kv, b)) for a, b in heads]
            joint = self._exchanged(torch.cat((q, k, v), dim=2), each)
            queries, keys, values = torch.split(joint, [len(own), len(seen), len(seen)], dim=2)
        else:
            joint = self._exchanged(
                torch.cat((q, k), dim=2), [(a, _from(num, b)) for a, b in heads]
            )
            queries, keys = torch.split(joint, [len(own), len(seen)], dim=2)
            values = self._exchanged(v, [(b,) for _, b in heads])
        which = [n // (num // kv) - seen.start for n in own]
        if which != [n // max(1, len(own) // len(seen)) for n in range(len(own))]:
            keys, values = (_of_each(x, which) for x in (keys, values))
        mixed = self._attend(queries, keys, values, packed)
        of_queries = [(a,) for a, _ in heads]
        there, back = partial(self._to_tokens, of_queries), partial(self._to_heads, of_queries)
        return there_and_back(mixed, there, back)

    def _exchanged(self, x: Tensor, heads: Sequence[Ranges]) -> Tensor:
        """``_to_heads``, and gradients back."""
        there, back = partial(self._to_heads, heads), partial(self._to_tokens, heads)
        return there_and_back(x, there, back)

    def _to_heads(self, heads: Sequence[Ranges], x: Tensor) -> Tensor:
        """``[batch, own seq, all heads, d_head]`` to ``[batch, their seq, own heads, d_head]``, in
        the order of the sequence."""
        mine = sum(map(len, heads[self._group.position]))
        given = [torch.cat([x[:, :, r.start : r.stop] for r in each], dim=2) for each in heads]
        sizes = [(len(x), _length(held), mine, x.shape[3]) for held in self._held]
        found = self._exchange(given, sizes)
        parts = [
            (places.start, part)
            for held, of_rank in zip(self._held, found, strict=True)
            for places, part in zip(held, torch.split(of_rank, [*map(len, held)], 1), strict=True)
        ]
        return torch.cat([part for _, part in sorted(parts, key=lambda each: each[0])], dim=1)

    def _to_tokens(self, heads: Sequence[Ranges], x: Tensor) -> Tensor:
        """The transpose of that: what several ranks say of a head is added up."""
        order = sorted((part for held in self._held for part in held), key=lambda part: part.start)
        parts = dict(zip(order, torch.split(x, [*map(len, order)], 1), strict=True))
        given = [torch.cat([parts[part] for part in held], dim=1) for held in self._held]
        many = max(part.stop for each in heads for part in each)
        seq = _length(self._held[self._group.position])
        sizes = [(len(x), seq, sum(map(len, each)), x.shape[3]) for each in heads]
        several = sum(size[2] for size in sizes) > many
        dtype = wide_dtype(x) if several else x.dtype
        whole = x.new_zeros((len(x), seq, many, x.shape[3]), dtype=dtype)
        for each, found in zip(heads, self._exchange(given, sizes), strict=True):
            for part, some in zip(each, torch.split(found, [*map(len, each)], 2), strict=True):
                whole[:, :, part.start : part.stop] += some
        return whole.to(x.dtype)

    def _exchange(self, given: list[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        comm, ranks = self._group.comm, self._group.ranks
        return comm.exchange(given, sizes, name="heads", group=ranks)()


def among_groups(total: Sum) -> Sum:
    """The same sum for whole groups of neighbours: the ranks with the same heads, and what the
    groups have."""
    size = total.group.near_ways
    groups = (total.parts[n : n + size] for n in range(0, len(total.parts), size))
    parts = [
        tuple(joined(sorted((part for held in group for part in held), key=lambda p: p.start)))
        for group in groups
    ]
    far = total.group.far
    return Sum(far, parts[far.position], tuple(parts), None)


def _heads(num: int, kv: int, ways: int, place: int) -> tuple[range, range]:
    """Query heads of one rank, as evenly as they go, and the key heads that they see: one that
    several ranks need goes to each of them."""
    own, group = part_of(num, ways, place), num // kv
    return own, range(own.start // group, (own.stop - 1) // group + 1)


def _of_each(x: Tensor, heads: Sequence[int]) -> Tensor:
    """``[batch, seq, .., d_head]`` by query head: not all share a key head with as many others."""
    return torch.stack([x[:, :, head] for head in heads], dim=2)


def _from(first: int, numbers: range) -> range:
    return range(first + numbers.start, first + numbers.stop)


def _length(held: Ranges) -> int:
    return sum(map(len, held))
