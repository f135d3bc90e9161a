"""A bucket's gradients summed between domains: terms to who sums them, and the sums back.

What each domain has summed inside goes in pieces to counterparts in the others. Whoever sums a
piece adds its terms in the order of the domains, whatever came first, in the dtype in which they
travel; so all domains end up with the same bits. Where the plan casts sums, terms and sums are
rounded on their way, and added as before; whoever adds goes on with what the others get.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm.comm import Comm, Finish
from weft.comm.members import Channel, Edge
from weft.comm.transport import nothing
from weft.parallel.buckets import Bucket
from weft.parallel.casts import Code
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
        cast = bucket.entries[0].held.cast
        self._code = Code.named(cast) if cast else None
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
        theirs = [views[met.cell][met.domain] for met in self._met]
        ranks = [met.rank for met in self._met]
        rooms = [self._room(mine[met.cell]) for met in self._met]
        parts = (*theirs, *mine)
        messages = [self._room(part) for part in parts] if self._code else []
        travelling = messages or parts
        going = list(zip(ranks, travelling, strict=False))
        came = list(zip(ranks, rooms, strict=True))
        send_terms = self._comm.trading(going, came, channel=self._terms, name=NAME)
        back = [(met.rank, travelling[len(theirs) + met.cell]) for met in self._met]
        send_sums = self._comm.trading(back, going, channel=self._sums, name=NAME)
        del travelling, going, came, back  # the steps alone keep memory

        def encode_and_send() -> Finish:
            self._encode(theirs, messages)
            return send_terms()

        def add_and_send() -> Finish:
            self._add(mine, rooms)
            rooms.clear()
            self._encode(mine, messages[len(theirs) :])
            return send_sums()

        def decode() -> Finish:
            for part, message in zip(parts, messages, strict=False):
                part.copy_(self._decoded(message, part))
            messages.clear()
            return nothing

        return [encode_and_send, add_and_send, decode] if messages else [send_terms, add_and_send]

    def _room(self, part: Tensor) -> Tensor:
        """For what a part travels as."""
        if self._code is None:
            return self._comm.room(part)
        size = self._code.flat_size(len(part))
        return self._comm.room(torch.empty(size, dtype=self._code.dtype, device="meta"))

    def _encode(self, parts: Sequence[Tensor], messages: Sequence[Tensor]) -> None:
        """The first so many; nothing where parts travel themselves."""
        if self._code is not None:
            for part, message in zip(parts, messages, strict=False):
                self._code.encode_flat(part, message)

    def _decoded(self, message: Tensor, part: Tensor) -> Tensor:
        """What came, like ``part``."""
        if self._code is None:
            return message
        came = torch.empty_like(part)
        self._code.decode_flat(message, came)
        return came

    def _add(self, mine: Sequence[Tensor], rooms: Sequence[Tensor]) -> None:
        """Of each cell the sum of its own part and of what came."""
        for number, part in enumerate(mine):
            met = zip(self._met, rooms, strict=True)
            others = [self._decoded(room, part) for each, room in met if each.cell == number]
            _add(part, self._me, others)

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
