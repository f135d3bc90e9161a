"""A bucket's gradients summed between domains: terms to who sums them, and the sums back.

What each domain has summed inside goes in pieces to counterparts in the others. Whoever sums a
piece adds its terms in the order of the domains, whatever came first, in the dtype in which they
travel; so all domains end up with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from torch import Tensor

from weft.comm.comm import Comm, Finish
from weft.comm.members import Channel, Edge
from weft.parallel.buckets import Bucket
from weft.parallel.crossing import Cell
from weft.parallel.params import Held, holders_of

CHANNELS = 1 << 16
"""Number of the first channel between domains; those of stages are lower."""
INSIDE = "gradients"
NAME = "gradients between domains"

Ranks = tuple[int, ...]


def between_domains(
    buckets: Sequence[Bucket], pieces: Mapping[str, Sequence[Held]], comm: Comm
) -> list[BetweenDomains | None]:
    """The way of each of this rank's buckets between domains; None for what stays in one.

    Opens what they talk over. Collective: ``pieces`` are those of the whole job.
    """
    channels = {
        ranks: (Channel(ranks, CHANNELS + 2 * n), Channel(ranks, CHANNELS + 2 * n + 1))
        for n, ranks in enumerate(holders_of(pieces, apart=True))
    }
    comm.open_channels(
        [each for pair in channels.values() for each in pair], _edges(channels, buckets)
    )
    comm.open_gathering(_returning(pieces), purpose="returns")
    return [
        BetweenDomains(bucket, channels[bucket.ranks], comm) if bucket.crosses else None
        for bucket in buckets
    ]


def _edges(
    channels: Mapping[Ranks, tuple[Channel, Channel]], buckets: Sequence[Bucket]
) -> dict[Channel, set[Edge]]:
    """Who sends to whom, of those that this rank shares a bucket with."""
    edges: dict[Channel, set[Edge]] = {each: set() for pair in channels.values() for each in pair}
    for bucket in buckets:
        joined = {pair for cell in bucket.cells() for pair in permutations(cell.ranks, 2)}
        for channel in channels.get(bucket.ranks, ()):
            edges[channel] |= joined
    return edges


def _returning(pieces: Mapping[str, Sequence[Held]]) -> list[Ranks]:
    """Ranks of a domain that bring together what all of them need whole, of the whole job."""
    apart = [h for cut in pieces.values() for h in cut if h.spec.trainable and not h.level]
    return sorted({near for held in apart for near in held.domains if len(near) > 1})


class BetweenDomains:
    """One bucket's way between domains, on one rank."""

    def __init__(self, bucket: Bucket, channels: tuple[Channel, Channel], comm: Comm) -> None:
        self._comm = comm
        self._terms, self._sums = channels
        self._ranks, self._near = bucket.ranks, bucket.near(comm.rank)
        self._me = bucket.domains.index(self._near)
        self._low = bucket.first(comm.rank)
        self._cells = list(bucket.cells_of(comm.rank))
        self._met = [
            _Met(number, domain, rank)
            for number, cell in enumerate(self._cells)
            for domain, rank in enumerate(cell.ranks)
            if domain != self._me
        ]

    def sum(
        self, first: Finish, own: Tensor, *, whole: Tensor | None = None
    ) -> tuple[Finish, Finish]:
        """Start to make of this rank's segment the sum over all domains, once ``first`` has ended;
        and to gather ``whole`` of the segments of its domain, where that is wanted.

        Returns as ``Comm.chain`` does.
        """
        steps = self._steps(own)
        if whole is not None and whole is not own:
            mine = whole.view(len(self._near), -1)[self._near.index(self._comm.rank)]
            gather = self._comm.gathering(whole, name=INSIDE, group=self._near)

            def come_back() -> Finish:
                mine.copy_(own)
                return gather()

            steps.append(come_back)
        return self._comm.chain(first, steps, name=NAME, group=self._ranks)

    def _steps(self, own: Tensor) -> list[Callable[[], Finish]]:
        """What makes of this rank's segment the sum over all domains: each step to be called when
        the one before has ended. What they will send is counted now."""
        views = [self._views(own, cell) for cell in self._cells]
        mine = [parts[self._me] for parts in views]
        rooms = [self._comm.room(mine[met.cell]) for met in self._met]
        theirs = [(met.rank, views[met.cell][met.domain]) for met in self._met]
        ranks = [met.rank for met in self._met]
        came = list(zip(ranks, rooms, strict=True))
        send_terms = self._comm.trading(theirs, came, channel=self._terms, name=NAME)
        back = [(met.rank, mine[met.cell]) for met in self._met]
        send_sums = self._comm.trading(back, theirs, channel=self._sums, name=NAME)

        def add_and_send() -> Finish:
            for number, part in enumerate(mine):
                met = zip(self._met, rooms, strict=True)
                _add(part, self._me, [room for each, room in met if each.cell == number])
            rooms.clear()
            return send_sums()

        return [send_terms, add_and_send]

    def _views(self, own: Tensor, cell: Cell) -> list[Tensor]:
        low = self._low
        return [own[part.start - low : part.stop - low] for part in cell.parts]


class _Met(NamedTuple):
    """A rank of another domain that has a cell of this one's."""

    cell: int
    """Its place among this rank's."""
    domain: int
    rank: int


def _add(mine: Tensor, me: int, others: Sequence[Tensor]) -> None:
    """``mine`` becomes the sum of all terms, in the order of domains; its own is the ``me``-th."""
    terms = [*others[:me], mine, *others[me:]]
    total = terms[0]
    for term in terms[1:]:
        total.add_(term)
    if total is not mine:
        mine.copy_(total)
