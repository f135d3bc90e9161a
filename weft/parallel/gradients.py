"""The gradient path: accumulate, reduce by name and box, hand to the optimizer.

Autograd leaves a gradient on a parameter; a hook moves it into a bucket of the accumulation dtype.
During the last backward of a step a bucket is reduced as soon as it is full, while backward goes
on; from ZeRO level 2 on during every backward. Where nothing needs reducing or converting,
autograd's own gradient is used and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm, Finish
from weft.config.errors import ConfigError
from weft.memory.kept import carry, forget, is_apart, pieces_of
from weft.memory.shelf import shelf_for
from weft.parallel.accumulate import Accumulator, Slot
from weft.parallel.between import between_domains
from weft.parallel.buckets import BUCKET_BYTES, Bucket, fill_buckets
from weft.parallel.fp8.gathered import WeightScales
from weft.parallel.mains import FlatParams, MainParam, start_rounded, whole_main
from weft.parallel.norms import TensorNorms
from weft.parallel.params import Held, LocalParam, assign_owners, holders_of, reduction_groups
from weft.parallel.taking import Take
from weft.parallel.wholes import WholeTensors
from weft.plan.box import Box
from weft.precision.roles import Roles

MAX_IN_FLIGHT = 2
"""Reductions under way of gradients that are not kept whole: each holds a buffer."""


class _Reduction(NamedTuple):
    """A reduction under way."""

    finish: Finish
    holds_buffer: bool
    """Its buffer is let go of when it ends, and all holders meet it in the same order."""


@dataclass(slots=True, eq=False)
class _Line:
    """The reductions of this rank in the order that all who share one keep."""

    rounds: list[tuple[Accumulator, int]]
    next: int = 0


class Gradients:
    """Gradients of this rank's parameters from ``begin`` of a step to ``finish``.

    Making one is collective: the groups that it needs are opened.

    Args:
        params: What this rank holds, in forward order.
        pieces: The common refinement of every parameter's tiling, of the whole job.
        precision: Dtypes of accumulation, reduction and update, and where each is kept.
        overlap: Reduce during backward, and gather updated parameters during what comes after;
            off: wait for each. The numbers do not depend on it.
        rounds: Microbatches of a step, those without samples for this rank included.
        may_be_absent: What no holder has a gradient for is left without one, as autograd leaves
            it, and the optimizer passes it over; off: its gradient is zero.
    """

    def __init__(
        self,
        params: Sequence[LocalParam],
        pieces: Mapping[str, Sequence[Held]],
        comm: Comm,
        *,
        precision: Roles,
        overlap: bool = True,
        rounds: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        may_be_absent: bool = False,
    ) -> None:
        self.precision = precision
        self.device = comm.device
        self.norms = TensorNorms(list(pieces), comm)
        """Of whole logical tensors, for optimizers that need them."""
        self.wholes = WholeTensors(
            pieces,
            comm,
            computed={local.spec.name: local.param.dtype for local in params},
            updated=precision.master.dtype,
        )
        """What else such optimizers may ask."""
        self._comm = comm
        self._overlap = overlap
        self._may_be_absent = may_be_absent
        together = holders_of(pieces, apart=True) * may_be_absent  # for counts over domains
        comm.open_groups([*reduction_groups(pieces), *together])
        comm.open_gathering(reduction_groups(pieces, sharded=True))
        self.frozen, whole, packed = _divided(params, pieces, precision, comm.rank)
        """Of ``frozen``: what no update changes, without gradient, master or state."""
        by_name = {local.spec.name: local for local in params}
        buckets = fill_buckets(packed, precision.reduction.dtype.itemsize, bucket_bytes)
        self._scales = WeightScales(pieces, comm)
        self.sharded = self._flats([b for b in buckets if b.level], by_name)
        self.mains = whole + [main for flat in self.sharded for main in flat.mains]
        self._find_scales()
        start_rounded(self.sharded)
        made = partial(Accumulator, params=by_name, comm=comm, precision=precision, rounds=rounds)
        ways = between_domains(buckets, pieces, comm)
        self._sums = [made(b, between=way) for b, way in zip(buckets, ways, strict=True)]
        self._mains_of = _by_bucket(self.mains, self._sums, comm.rank)
        self._note_rests()
        self._names = list(pieces)
        self._slots: dict[nn.Parameter, list[tuple[Accumulator, Slot]]] = {}
        for sums in self._sums:
            for slot in sums.slots:
                self._slots.setdefault(slot.param, []).append((sums, slot))
        hook = Take(self)
        self._hooks = [
            param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for param in self._slots
        ]
        self.is_told_of_skips = False
        """``skip`` says where other ranks have samples and this one has none. All ranks of a stage
        then begin gathers and reductions in one order, which libraries ask for where ranks share
        several communicators. Otherwise zeros for such microbatches go ahead of the others."""
        self.follow(rounds)
        self._num_backwards = 0
        self._awaited = 0
        self._in_flight: list[_Reduction] = []

    def _flats(
        self, buckets: Sequence[Bucket], params: Mapping[str, LocalParam]
    ) -> list[FlatParams]:
        """Of buckets of which holders keep a segment each."""
        comm = self._comm
        roles = {tier: self.precision.kept_in(tier) for tier in {b.tier for b in buckets}}
        shelves = {tier: shelf_for(role.parameters, comm.device) for tier, role in roles.items()}
        made = partial(FlatParams, scales=self._scales)
        return [made(b, params, comm, roles[b.tier].master, shelf=shelves[b.tier]) for b in buckets]

    def _note_rests(self) -> None:
        for sums, mains in zip(self._sums, self._mains_of, strict=True):
            for main, view in zip(mains, sums.sums, strict=True):
                main.rests = view if sums.is_apart else None

    def follow(self, rounds: int) -> None:
        """So many microbatches in each of the steps from here on."""
        self._rounds = rounds
        for sums in self._sums:
            sums.follow(rounds)
        order = reduction_order([(s.bucket, s.rounds) for s in self._sums], self._names)
        self._line = _Line([(self._sums[number], round_) for number, round_ in order])

    def close(self) -> None:
        """Leave gradients on the parameters from now on, as autograd does."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin(self, num_backwards: int) -> None:
        """Forget the last step's gradients.

        ``num_backwards``: backward passes of each stage in this step, at most ``rounds`` where
        there are several. What they add is complete, and may be reduced, when that many have
        added to each gradient.
        """
        self._num_backwards = num_backwards
        self._awaited = self._rounds if self.is_told_of_skips else num_backwards
        for main in self.mains:
            main.value.grad = main.grad = None
        for sums in self._sums:
            sums.begin()
        self._line.next = 0
        if not self._awaited:
            self.settle()  # no forward of this rank does
            self._reduce_full()  # the others need not wait for its zeros

    def finish(self) -> None:
        """Wait until every gradient is the sum over all ranks, and set each ``grad``."""
        self._reduce(len(self._line.rounds))
        present = self._count_present() if self._may_be_absent else None
        for reduction in self._in_flight:
            reduction.finish()
        self._in_flight.clear()
        for sums in self._sums:
            sums.check(self._num_backwards)
        for main in self.mains:  # what needs no bucket is where autograd left it
            main.grad = main.value.grad
            if main.grad is not None:
                refuse_sparse(main.spec.name, main.grad)
        for sums, mains in zip(self._sums, self._mains_of, strict=True):
            for main, view in zip(mains, sums.sums, strict=True):
                main.grad = view.to(main.value.dtype)
        if present is None:
            for main in self.mains:
                if main.grad is None:
                    shape, dtype = main.value.shape, main.value.dtype
                    main.grad = torch.zeros(shape, dtype=dtype, device=self.device)
        else:
            self._forget_absent(present)

    def _count_present(self) -> dict[tuple[int, ...], Tensor]:
        """By group: how many of its ranks have a gradient for each piece, after the reductions."""
        present = {}
        for ranks in sorted({sums.bucket.ranks for sums in self._sums}):
            slots = [s for sums in self._sums if sums.bucket.ranks == ranks for s in sums.slots]
            came = torch.tensor([float(slot.received > 0) for slot in slots])
            present[ranks] = came = came.to(self._comm.device)
            finish = self._comm.all_reduce(came, name="presence", group=ranks, wait=False)
            self._in_flight.append(_Reduction(finish, holds_buffer=False))
        return present

    def _forget_absent(self, present: Mapping[tuple[int, ...], Tensor]) -> None:
        counts = {ranks: iter(came.tolist()) for ranks, came in present.items()}
        absent = {
            (entry.held.spec.name, entry.held.box)
            for sums in self._sums
            for entry in sums.bucket.entries
            if not next(counts[sums.bucket.ranks])
        }
        for sums, mains in zip(self._sums, self._mains_of, strict=True):
            for main, kept in zip(mains, sums.bucket.kept(self._comm.rank), strict=True):
                if (kept.held.spec.name, kept.held.box) in absent:
                    main.grad = None

    @property
    def kept_bytes(self) -> int:
        """Memory of gradients from one step to the next."""
        return sum(sums.kept_bytes for sums in self._sums)

    def squared_norm(self) -> Tensor:
        """Sum of squares of the gradients this rank owns, fp64 scalar on the device. Added in one
        order, wherever gradients are kept."""
        places = {name: place for place, name in enumerate(self._names)}
        owned = [m for m in self.mains if m.owned and m.grad is not None]
        owned.sort(key=lambda main: (places[main.spec.name], main.box))
        here = [m.grad for m in owned if m.grad is not None and m.rests is None]
        if not owned:
            return torch.zeros((), dtype=torch.float64, device=self._comm.device)
        found = iter(torch._foreach_norm(here) if here else ())
        norms = [next(found) if main.rests is None else self._norm(main.rests) for main in owned]
        return torch.stack(norms).double().square().sum()

    def _norm(self, rests: Tensor) -> Tensor:
        """Of a gradient that is kept elsewhere."""
        (norm,) = torch._foreach_norm([rests.to(self.device)])
        forget(rests)
        return norm

    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient by a scalar of the device."""
        grads = [m.grad for m in self.mains if m.grad is not None and m.rests is None]
        if grads:
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))
        for rests in [m.rests for m in self.mains if m.rests is not None]:
            for part in pieces_of(rests):
                part.copy_(part.to(self.device).mul_(factor))
            forget(rests)

    @torch.no_grad()
    def publish(self) -> None:
        """Bring updated values to the parameters; those of other ranks arrive by ``fence``."""
        masters = [(m.target, m.value) for m in self.mains if m.target is not None]
        here = [pair for pair in masters if not is_apart(pair[1], self.device)]
        if here:
            targets, values = zip(*here, strict=True)
            torch._foreach_copy_(targets, values)
        for target, value in masters if len(here) < len(masters) else ():
            carry(value, target, by=self.device)
        self._find_scales()
        for flat in reversed(self.sharded):  # as forward meets them
            flat.publish()
        if not self._overlap:
            self.fence()

    def _find_scales(self) -> None:
        self._scales.find((main.spec.name, main.box, main.value) for main in self.mains)

    def fence(self) -> None:
        """Wait until no parameter has to be brought up to date. Level 3 stays in segments."""
        for flat in self.sharded:
            if flat.bucket.level < 3:
                flat.wait()

    def settle(self) -> None:
        """Wait until nothing more comes to the memory in which ``mains`` lie."""
        for flat in self.sharded:
            if flat.is_in_place:
                flat.wait()

    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        """A gradient that autograd did not make, of one backward pass."""
        if param in self._slots:
            param.grad = grad
            self.take(param)
        elif param.grad is None:
            param.grad = grad
        else:
            param.grad += grad

    def skip(self, params: Iterable[nn.Parameter]) -> None:
        """Other ranks have gradients of these now, of a microbatch without samples for this one."""
        for param in params:
            for _, slot in self._slots.get(param, ()):
                slot.skipped += 1
        self._reduce_full()

    def take(self, param: Tensor) -> None:
        """A gradient is complete for this microbatch: move it into its buckets."""
        grad = param.grad
        if grad is None:  # put off: it comes through ``add``
            return
        places = self._slots[param]  # type: ignore[index]
        if grad.layout != torch.strided:
            sums, slot = places[0]
            param.grad = None
            refuse_sparse(sums.name_of(slot), grad)
        grad = grad.detach()  # takes less than to say that nothing here is differentiated
        for sums, slot in places:
            sums.add(slot, grad)
        param.grad = None
        self._reduce_full()

    def _reduce_full(self) -> None:
        """Reduce what is full, as far as the order allows."""
        line = self._line
        ready = line.next
        while ready < len(line.rounds):
            sums, round_ = line.rounds[ready]
            may_go = (self._overlap and not sums.is_late) or sums.rounds > 1
            if not may_go or not sums.is_full(round_, self._awaited):
                break
            ready += 1
        self._reduce(ready)

    def _reduce(self, end: int) -> None:
        line = self._line
        for sums, round_ in line.rounds[line.next : end]:
            # Who has no samples in the last microbatches sends zeros for them ahead of the others.
            is_ahead = round_ >= self._awaited
            holds_buffer = sums.bucket.reduces_each_backward and not is_ahead
            self._in_flight.append(_Reduction(sums.reduce(), holds_buffer))
            self._keep_few()
            if sums.bucket.crosses and round_ == sums.rounds - 1:
                self._in_flight.append(_Reduction(sums.sum_between(), holds_buffer=False))
        line.next = max(line.next, end)

    def _keep_few(self) -> None:
        """Wait for the oldest where all holders meet these reductions in the same order."""
        limit = MAX_IN_FLIGHT if self._overlap else 0
        held = [reduction for reduction in self._in_flight if reduction.holds_buffer]
        for oldest in held[: max(0, len(held) - limit)]:
            self._in_flight.remove(oldest)
            oldest.finish()


def refuse_sparse(name: str, grad: Tensor) -> None:
    """Gradients are added up element by element.

    Raises:
        ConfigError: the gradient of the parameter of this name has only some of its elements.
    """
    if grad.layout != torch.strided:
        hint = "Leave sparse=True of F.embedding out: Weft adds up gradients that are dense; SGD "
        hint += "and Adam take them."
        raise ConfigError(f"gradient of {name}", "sparse", "a dense one", hint)


def _divided(
    params: Sequence[LocalParam], pieces: Mapping[str, Sequence[Held]], precision: Roles, rank: int
) -> tuple[list[MainParam], list[MainParam], list[Held]]:
    """The pieces that no update changes (forward and backward leave them out), those that this rank
    updates as a whole, and those whose gradients go into buckets."""
    frozen: list[MainParam] = []
    whole: list[MainParam] = []
    packed: list[Held] = []
    owners = assign_owners(pieces)
    for local in params:
        mine = [held for held in pieces[local.spec.name] if local.stored.contains(held.box)]
        assert sum(held.box.numel for held in mine) == local.stored.numel, local.spec.name
        for held in mine:
            owned = owners.get((local.spec.name, held.box)) == rank
            if not local.spec.trainable:
                value = local.param.detach()[local.stored.slices(held.box)]
                frozen.append(MainParam(held.spec, held.box, value, local.param, owned))
                local.param.requires_grad_(False)
                continue
            target = None
            if not held.level:
                whole.append(whole_main(local, held, precision.master, owned=owned))
                target = whole[-1].target
            is_converted = local.param.dtype != precision.accumulation.dtype
            if held.level or len(held.ranks) > 1 or is_converted or target is not None:
                packed.append(held)
    return frozen, whole, packed


def _by_bucket(
    mains: Sequence[MainParam], sums: Sequence[Accumulator], rank: int
) -> list[list[MainParam]]:
    """For each bucket the main parameters that its sums are for, in the same order."""
    by_box = {(main.spec.name, main.box): main for main in mains}
    kept = (each.bucket.kept(rank) for each in sums)
    return [[by_box[part.held.spec.name, part.box] for part in parts] for parts in kept]


def reduction_order(
    buckets: Sequence[tuple[Bucket, int]], names: Sequence[str]
) -> list[tuple[int, int]]:
    """Numbers of a rank's buckets, each with its round, in the order in which they are reduced.

    Each bucket is given with the number of its rounds; ``names`` are all parameters of the job.
    What a rank does among others follows from the bucket alone, so that the calls of all ranks, in
    whatever groups, fit into one order of the job. Libraries ask for that where ranks share several
    communicators. It is about the order of backward, whose last gradient of a bucket is that of
    its last piece; what only the end of a step completes goes last, and so does the table that
    embedding and head share.
    """
    places = {name: place for place, name in enumerate(names)}

    def place(each: tuple[int, int]) -> tuple[int, int, Box, tuple[int, ...]]:
        bucket, rounds = buckets[each[0]]
        last = bucket.entries[-1].held
        return each[1] - rounds, -places[last.spec.name], last.box, bucket.ranks

    every = [(number, each) for number, (_, last) in enumerate(buckets) for each in range(last)]
    return sorted(every, key=place)
