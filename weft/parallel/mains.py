"""What the optimizer updates, and how it reaches the parameters that the model computes with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm, Finish
from weft.memory.kept import carry, forget, is_apart, zeros
from weft.memory.shelf import Shelf
from weft.parallel.buckets import Bucket
from weft.parallel.fp8.gathered import RoundedBucket, WeightScales
from weft.parallel.params import Held, LocalParam
from weft.plan.box import Box
from weft.plan.model import ParamSpec
from weft.precision.roles import Role, Tier


@dataclass(slots=True, eq=False)
class MainParam:
    """One box of a parameter as the optimizer sees it.

    ``value`` is memory that the model computes with, or a master copy of it where the model
    computes in a lower precision.
    """

    spec: ParamSpec
    box: Box
    """In global indices."""
    value: Tensor
    param: nn.Parameter
    owned: bool
    """This rank counts the box in norms and writes it to checkpoints."""
    target: Tensor | None = None
    """What a master copy is copied into after an update; None where something else does it."""
    ranks: tuple[int, ...] = ()
    """Those that update the same box, this one among them; empty: it alone does."""
    rests: Tensor | None = None
    """Where its gradient is, of what is not kept on the device as a whole."""
    tier: Tier = "device"
    """Where its state is kept besides; ``device``: as the precision says."""
    grad: Tensor | None = None
    """In the dtype of ``value``; valid between ``Gradients.finish`` and the next ``begin``."""


def whole_main(local: LocalParam, held: Held, master: Role, *, owned: bool) -> MainParam:
    """A piece that each of its holders updates itself: the parameter, or a master of the piece."""
    is_same = local.param.dtype == master.dtype
    if local.stored.boxes == (held.box,) and is_same:
        return MainParam(held.spec, held.box, local.param, local.param, owned, ranks=held.ranks)
    target = local.param.detach()[local.stored.slices(held.box)]
    value = _copy(target, master)
    return MainParam(held.spec, held.box, value, local.param, owned, target, ranks=held.ranks)


def _copy(values: Tensor, master: Role, *, apart: bool = False) -> Tensor:
    """For updates, where master copies are kept; of the same dtype it is no such copy, unless all
    of it is kept ``apart``."""
    if values.dtype == master.dtype and not apart:
        return values.clone()
    copy = zeros(values.shape, master, values.device)
    copy.copy_(values)
    forget(copy)
    return copy


class _Copy:
    """A box of a parameter that is no view of a buffer: the parameter has other boxes, or another
    dtype. Where all of them come and go it has no memory while they are gone."""

    def __init__(self, param: nn.Parameter, place: tuple[slice, ...], view: Tensor) -> None:
        self._param, self._place, self.view = param, place, view
        self.is_hollow = not param.untyped_storage().nbytes()

    def part(self) -> Tensor:
        """Of the parameter; autograd does not see what it is given, which is what it had."""
        if not self._param.untyped_storage().nbytes():
            self._param.untyped_storage().resize_(self._param.nbytes)
        return self._param.data[self._place]

    def let_go(self) -> None:
        """All boxes of a unit come and go at a time."""
        if self.is_hollow:
            self._param.untyped_storage().resize_(0)


class FlatParams:
    """The parameters of one bucket whose holders, or those of each domain, keep a segment each
    (ZeRO).

    They lie in one flat buffer in the model's dtype; parameters are views of it. (Where holders
    compute in unlike dtypes it has the main one, and parameters are copies.) What this rank
    updates is its own segment: the buffer's memory where the dtypes agree, else a master copy. At
    level 3 the buffer has memory only between ``start`` and ``free``: PyTorch does not notice who
    reads a parameter outside, and the process dies. ``mains`` can be read at any time.

    What is rounded before it is gathered lies in the buffer as it was rounded, this rank's too.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Mapping[str, LocalParam],
        comm: Comm,
        master: Role,
        *,
        shelf: Shelf | None = None,
        scales: WeightScales,
    ) -> None:
        """``shelf``: where this rank's segment waits at level 3; None: on the device. ``scales``:
        of what is rounded before it is gathered."""
        self.bucket = bucket
        self._comm = comm
        first = params[bucket.entries[0].held.spec.name].param
        dtype = first.dtype if bucket.in_one_precision else master.dtype
        self.flat = torch.zeros(bucket.numel(comm.rank), dtype=dtype, device=first.device)
        self._copies = []
        for entry in bucket.entries:
            local = params[entry.held.spec.name]
            view = self.flat[entry.start : entry.stop].view(entry.box.size)
            copy = _Copy(local.param, local.stored.slices(entry.box), view)
            if not copy.is_hollow:
                view.copy_(copy.part())
            if local.stored.boxes == (entry.box,) and local.param.dtype == dtype:
                local.param.data = view
            else:
                self._copies.append(copy)
        self._near, self._segments = bucket.near(comm.rank), bucket.segments(comm.rank)
        first_place = bucket.first(comm.rank)
        self._place = slice(first_place, first_place + bucket.segment(comm.rank))
        self._own = self.flat[self._place]
        self._rounded = RoundedBucket(bucket, comm.rank, scales) if bucket.is_rounded else None
        self._message: Tensor | None = None
        """What is gathered, where it is not the buffer."""
        is_same = self.flat.dtype == master.dtype and self._rounded is None
        self.is_in_place = bucket.level < 3 and is_same
        """What this rank updates is memory that others' segments are gathered beside."""
        self._share = self._own
        if not self.is_in_place:
            self._share = _copy(self._own, master, apart=bucket.tier != "device")
        self._shelf = shelf if bucket.level == 3 else None
        self._at_rest = self._resting()
        """What others get of this rank, at level 3 time and again; rounded by ``rest``."""
        views = bucket.kept_views(comm.rank, self._share)
        owned = comm.rank in bucket.domains[0]  # the others have the same
        self.mains = [
            MainParam(
                each.held.spec,
                each.box,
                view,
                params[each.held.spec.name].param,
                owned,
                tier=bucket.tier,
            )
            for each, view in zip(bucket.kept(comm.rank), views, strict=True)
        ]
        self._pending: Finish | None = None
        self._is_whole = True
        self.free()

    def _resting(self) -> Tensor:
        dtype = self.flat.dtype if self._rounded is None else torch.uint8
        if self._shelf is not None:
            if self._share.dtype == self.flat.dtype and self._rounded is None:
                assert self.bucket.tier != "device", "updates change what is computed with"
                return self._share
            return self._shelf.empty(len(self._own), dtype)
        if self._rounded is not None:
            return torch.zeros(len(self._own), dtype=dtype, device=self.flat.device)
        if self.bucket.level == 3 and is_apart(self._share, self.flat.device):
            return self._own.clone()
        return self._share

    def publish(self) -> None:
        """After an update: send this rank's segment to the others, who ask for it by ``wait``."""
        if self.bucket.level < 3:
            self.wait()
            self.rest()
            self._gather()
        else:
            self.free()
            self.rest()

    def rest(self) -> None:
        """Make what others get of this rank's segment, where they do not get it itself."""
        if self._rounded is not None:
            values = torch.empty_like(self._share, dtype=self.flat.dtype, device=self.flat.device)
            carry(self._share, values, by=self.flat.device)
            self._at_rest.copy_(self._rounded.encode(values))
        elif self._at_rest is not self._share:
            carry(self._share, self._at_rest, by=self.flat.device)
        forget(self._at_rest)

    @property
    def is_here(self) -> bool:
        """The parameters are whole, and nobody has to wait."""
        return self._is_whole and self._pending is None

    @property
    def is_coming(self) -> bool:
        """They are on their way."""
        return self._pending is not None

    def start(self) -> None:
        """Begin to gather what ``free`` let go of."""
        if not self._is_whole and self._pending is None:
            if self._rounded is None:
                self.flat.untyped_storage().resize_(self.flat.nbytes)
            self._gather()

    def wait(self) -> None:
        """Return when the parameters are whole and up to date."""
        self.start()
        if self._pending is not None:
            self._pending()
            self._pending = None
            if self._rounded is not None and self._message is not None:
                if self.bucket.level == 3:
                    self.flat.untyped_storage().resize_(self.flat.nbytes)
                self._rounded.decode(self._message, self.flat)
                self._message = None
            for copy in self._copies:
                copy.part().copy_(copy.view)
        self._is_whole = True

    def free(self) -> None:
        """Level 3: let go of all but this rank's segment."""
        if self.bucket.level == 3 and (self._is_whole or self._pending is not None):
            self.wait()
            self.flat.untyped_storage().resize_(0)
            for copy in self._copies:
                copy.let_go()
            self._is_whole = False

    def _gather(self) -> None:
        assert self._pending is None, f"{self._near}: a gather was not waited for"
        flat, own = self.flat, self._own
        if self._rounded is not None:
            flat = self._message = torch.empty(len(flat), dtype=torch.uint8, device=flat.device)
            own = flat[self._place]
        if self._shelf is not None:
            gathered = partial(self._gathered, flat)
            self._pending = self._shelf.bring(self._at_rest, own, gathered)
            return
        if not self.is_in_place:
            carry(self._at_rest, own, by=self.flat.device)
        self._pending = self._gathered(flat)

    def _gathered(self, flat: Tensor) -> Finish:
        return self._comm.all_gather(
            flat, name="parameters", group=self._near, sizes=self._segments
        )


def start_rounded(flats: Iterable[FlatParams]) -> None:
    """Before the first update: round what is gathered rounded."""
    for flat in flats:
        if flat.bucket.is_rounded:
            flat.rest()
