"""The gradients of one bucket: added up over micro-batches, then summed over all holders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm, Finish
from weft.comm.transport import nothing, then
from weft.config.errors import ConfigError
from weft.memory.kept import carry, forget, is_apart, pieces_of, zeros
from weft.parallel.between import INSIDE, BetweenDomains
from weft.parallel.buckets import Bucket
from weft.parallel.params import LocalParam
from weft.parallel.rounded_sums import RoundedSums
from weft.precision.roles import Roles


@dataclass(slots=True, eq=False)
class _Once:
    """Waits for something the first time that it is called."""

    finish: Finish
    uses: list[Tensor | Finish]
    """What is read and written until then, or keeps that: nobody else may get the memory."""

    def __call__(self) -> None:
        finish, self.finish = self.finish, nothing
        finish()
        self.uses.clear()


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one piece's gradient inside a bucket."""

    param: nn.Parameter
    index: tuple[slice, ...] | None
    """The piece inside the parameter; None: it is all of it."""
    place: slice
    """The piece inside the bucket."""
    uses: int
    """Stages of this rank that compute with the parameter: 2 for a tied one on a V's ends."""
    is_fresh: bool = True
    """Nothing was added yet: overwrite, do not add."""
    received: int = 0
    """Gradients that came in this step."""
    skipped: int = 0
    """Those of other ranks, of microbatches of which this one has no samples."""
    room: Tensor | None = None
    """Where it is added up, if that is the same from step to step."""


class Accumulator:
    """The gradients of one bucket, from the first that comes to their sum over all holders."""

    def __init__(
        self,
        bucket: Bucket,
        params: Mapping[str, LocalParam],
        comm: Comm,
        precision: Roles,
        rounds: int,
        between: BetweenDomains | None = None,
    ) -> None:
        """``between``: the way of a bucket that crosses between domains."""
        self.bucket = bucket
        self.near = bucket.near(comm.rank)
        """Those that hold it in this rank's domain."""
        self.is_late = bucket.is_late
        self._segments = bucket.segments(comm.rank)
        self._between = between
        self._rounded = RoundedSums(bucket, comm) if bucket.is_cast and len(self.near) > 1 else None
        self._arriving: list[_Once] = []
        """Of this step, one for each round, where sums go on between domains."""
        self._parts: tuple[Tensor | None, Tensor | None] = (None, None)
        """At level 0: what is summed inside the domain, and this rank's part of that."""
        self.follow(rounds)
        self._comm = comm
        role = precision.kept_in(bucket.tier).accumulation
        self._dtype = role.dtype
        self._device = next(iter(params.values())).param.device
        self._travel_dtype = precision.reduction.dtype
        self._flat: Tensor | None = None
        """Persistent up to level 1; above from the first gradient to the reduction."""
        segment = bucket.segment(comm.rank) if bucket.level else 0
        whole = replace(role, tier="device") if bucket.level < 3 else role
        self._own = zeros((segment,), whole, self._device)
        self.is_apart = is_apart(self._own, self._device)
        """Sums are not kept on the device."""
        self.slots = []
        for entry in bucket.entries:
            local = params[entry.held.spec.name]
            place = slice(entry.start, entry.stop)
            is_all = entry.box.size == local.stored.size
            index = None if is_all else local.stored.slices(entry.box)
            self.slots.append(Slot(local.param, index, place, local.uses))
        self._num_reduced = 0

    @property
    def kept_bytes(self) -> int:
        own = 0 if self.is_apart else self._own.nbytes
        return own + (0 if self._flat is None else self._flat.nbytes)

    def follow(self, rounds: int) -> None:
        """So many microbatches in each of the steps from here on."""
        self.rounds = rounds if self.bucket.reduces_each_backward else 1

    def begin(self) -> None:
        for slot in self.slots:
            slot.is_fresh, slot.received, slot.skipped = True, 0, 0
        self._num_reduced = 0
        self._arriving.clear()

    def add(self, slot: Slot, grad: Tensor) -> None:
        part = grad if slot.index is None else grad[slot.index]
        room = slot.room
        if room is None:
            room = self._whole()[slot.place].view(part.shape)
            slot.room = room if self.bucket.level < 2 else None
        if slot.is_fresh:
            room.copy_(part)
        else:
            room.add_(part)
        slot.is_fresh, slot.received = False, slot.received + 1

    def name_of(self, slot: Slot) -> str:
        """The parameter that it has room for."""
        return self.bucket.entries[self.slots.index(slot)].held.spec.name

    def is_full(self, round_: int, num_backwards: int) -> bool:
        """Everything that has to travel in this round is here, or known not to come."""
        wanted = num_backwards if round_ == self.rounds - 1 else min(round_ + 1, num_backwards)
        return all(slot.received + slot.skipped >= wanted * slot.uses for slot in self.slots)

    def check(self, num_backwards: int) -> None:
        """A gradient that came in two parts of one backward may have missed its reduction."""
        for slot, entry in zip(self.slots, self.bucket.entries, strict=True):
            if slot.received > num_backwards * slot.uses:
                raise ConfigError(
                    entry.held.spec.name,
                    f"{slot.received} gradients in {num_backwards} backwards",
                    "one of each",
                    "Checkpoint with use_reentrant=False, and use a linear layer's weight by its "
                    "own call only.",
                )

    def reduce(self) -> Finish:
        """Start to sum what came since the last round over all holders of this domain."""
        flat = self._filled()
        sent = flat.to(self._travel_dtype)  # the same tensor where the dtypes agree
        if self.bucket.level == 0 and self._between is None:
            arrived = self._all_reduced(sent)
            return arrived if sent is flat else then(arrived, lambda: flat.copy_(sent))
        if self.bucket.level == 0:
            return self._sum_in_parts(sent)
        is_first = self._num_reduced == 0
        self._num_reduced += 1
        if self.bucket.level >= 2:
            self._flat = None
        if self.is_apart and len(self.near) == 1:  # nobody to wait for
            self._put(sent, is_first=is_first)
            return nothing
        is_in_place = is_first and sent is flat and not self.is_apart
        own = self._own if is_in_place else sent.new_empty(self._own.shape)
        arrived = self._scattered(sent, own)

        def finish() -> None:
            arrived()
            if not is_in_place:
                self._put(own, is_first=is_first)

        return self._noted(finish, [sent, own])

    def _all_reduced(self, flat: Tensor) -> Finish:
        if self._rounded is not None:
            return self._rounded.everywhere(flat)
        return self._comm.all_reduce(flat, name=INSIDE, group=self.near, wait=False)

    def _scattered(self, flat: Tensor, own: Tensor) -> Finish:
        if self._rounded is not None:
            return self._rounded.scatter(flat, own)
        return self._comm.reduce_scatter(
            flat, own, name=INSIDE, group=self.near, sizes=self._segments
        )

    def _put(self, came: Tensor, *, is_first: bool) -> None:
        """Into this rank's segment, from the second round on to what is there."""
        if is_first:
            carry(came, self._own, by=self._device)
        else:
            parts = pieces_of(came, like=self._own)
            for own, part in zip(pieces_of(self._own), parts, strict=True):
                own.copy_(own.to(self._device).add_(part))  # of itself, where that is its device
        forget(self._own)

    def sum_between(self) -> Finish:
        """After the last round: start to sum over domains what each has summed. All ranks begin
        these in one order."""
        assert self._between is not None, f"{self.bucket.ranks} are in one domain"
        for earlier in self._arriving[:-1]:
            earlier()
        last = self._arriving[-1]
        last.uses.append(last.finish)
        if self.bucket.level == 0:
            (sent, part), self._parts = self._parts, (None, None)
            assert sent is not None and part is not None, "nothing was summed inside the domain"
            last.finish, ended = self._between.sum(last.finish, part, whole=sent)
            if sent is not self._flat:
                ended = then(ended, partial(self._whole().copy_, sent))
            return _Once(ended, [sent, part])
        if self._own.dtype == self._travel_dtype and not self.is_apart:
            last.finish, ended = self._between.sum(last.finish, self._own)
            return ended
        part = torch.empty_like(self._own, dtype=self._travel_dtype, device=self._device)
        first = then(last.finish, partial(part.copy_, self._own))
        last.finish, ended = self._between.sum(first, part)
        return _Once(then(ended, partial(self._own.copy_, part)), [part])

    def _sum_in_parts(self, sent: Tensor) -> Finish:
        """Level 0 in several domains: a part for each rank, until all are summed."""
        part = sent if len(self.near) == 1 else sent.new_empty(len(sent) // len(self.near))
        arrived = nothing
        if part is not sent:
            arrived = self._scattered(sent, part)
        self._parts = sent, part
        return self._noted(arrived, [sent, part])

    def _noted(self, finish: Finish, uses: list[Tensor | Finish]) -> Finish:
        """What ends once, whoever waits for it, where sums go on between domains."""
        if self._between is None:
            return finish
        self._arriving.append(_Once(finish, uses))
        return self._arriving[-1]

    @cached_property
    def sums(self) -> list[Tensor]:
        """What this rank's optimizer needs: all pieces whole, or what its segment has."""
        memory = self._own if self.bucket.level else self._whole()
        return self.bucket.kept_views(self._comm.rank, memory)

    def _filled(self) -> Tensor:
        """The gradients of one round, with zeros where nothing came."""
        flat = self._whole()
        for slot in self.slots:
            if slot.is_fresh:  # no part of this rank's batch used the parameter
                flat[slot.place].zero_()
            slot.is_fresh = True
        return flat

    def _whole(self) -> Tensor:
        if self._flat is None:
            self._flat = self._empty(self.bucket.numel(self._comm.rank))
        return self._flat

    def _empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self._dtype, device=self._device)
