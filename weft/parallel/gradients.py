"""The gradient path: accumulate, reduce by name and box, hand to the optimizer.

Autograd leaves a gradient on a parameter; a hook moves it into a bucket of the main dtype. During
the last backward of a step a bucket is reduced as soon as it is full, while backward goes on.
Where nothing needs reducing or converting, autograd's own gradient is used and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm, Finish
from weft.parallel.params import LocalParam, assign_owners
from weft.plan.box import Box
from weft.plan.model import ParamSpec
from weft.plan.tiling import Piece

BUCKET_BYTES = 8 * 2**20
"""Enough to hide the latency of a reduction, small enough that the first one starts early."""


@dataclass(slots=True, eq=False)
class MainParam:
    """One piece of a parameter as the optimizer sees it.

    ``value`` is the parameter itself, or a master copy of the piece where the model computes in a
    lower precision or holds the piece as part of a larger tensor. ``value.grad`` is valid between
    ``Gradients.finish`` and the next ``begin``.
    """

    spec: ParamSpec
    box: Box
    """The piece, in global indices."""
    value: Tensor
    param: nn.Parameter
    index: tuple[slice, ...]
    """The piece inside ``param``."""
    ranks: tuple[int, ...]
    owned: bool
    """This rank counts the piece in norms and writes it to checkpoints."""
    uses: int = 1
    """Stages of this rank that compute with the parameter: 2 for a tied one on a V's ends."""

    @property
    def is_master(self) -> bool:
        return self.value is not self.param


@dataclass(slots=True, eq=False)
class _Slot:
    """Room for one piece's gradient inside a bucket."""

    main: MainParam
    view: Tensor
    fresh: bool = True
    """Nothing was added in this step: overwrite, do not add."""
    missing: int = 0
    """Backward passes of this step that have still to add something."""


@dataclass(slots=True, eq=False)
class _Bucket:
    """Gradients that are reduced together: same ranks, neighbours in backward order."""

    ranks: tuple[int, ...]
    flat: Tensor
    slots: list[_Slot] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def is_full(self) -> bool:
        """Every gradient in it is complete."""
        return not any(slot.missing for slot in self.slots)


class Gradients:
    """Gradients of this rank's parameters from ``begin`` of a step to ``finish``.

    Args:
        params: What this rank holds, in forward order.
        pieces: The common refinement of every parameter's tiling, of the whole job.
        main_dtype: Dtype of accumulation, reduction and update.
        overlap: Reduce full buckets during the last backward; off: all of them after it. The
            numbers do not depend on it.
    """

    def __init__(
        self,
        params: Sequence[LocalParam],
        pieces: Mapping[str, Sequence[Piece]],
        comm: Comm,
        *,
        main_dtype: torch.dtype,
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._comm = comm
        self._overlap = overlap
        owners = assign_owners(pieces)
        self.mains: list[MainParam] = []
        for local in params:
            held = [piece for piece in pieces[local.spec.name] if local.box.contains(piece.box)]
            assert sum(piece.box.numel for piece in held) == local.box.numel, local.spec.name
            for piece in held:
                owned = owners[local.spec.name, piece.box] == comm.rank
                self.mains.append(_main_param(local, piece, main_dtype, owned=owned))
        reduced = [m for m in self.mains if m.is_master or len(m.ranks) > 1]
        self._buckets = _fill_buckets(reduced, main_dtype, bucket_bytes)
        self._slots: dict[nn.Parameter, list[_Slot]] = {}
        for bucket in self._buckets:
            for slot in bucket.slots:
                self._slots.setdefault(slot.main.param, []).append(slot)
        for param in self._slots:
            param.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
        self._next = 0

    def begin(self, num_backwards: int) -> None:
        """Forget the last step's gradients.

        ``num_backwards``: backward passes of each stage in this step. A bucket is full, and may
        be reduced, when that many have added to each of its gradients.
        """
        for main in self.mains:
            main.value.grad = None
        for bucket in self._buckets:
            bucket.finish = None
            for slot in bucket.slots:
                slot.fresh, slot.missing = True, num_backwards * slot.main.uses
        self._next = 0

    def finish(self) -> None:
        """Wait until every gradient is the sum over all ranks, and set ``value.grad``."""
        for bucket in self._buckets:
            for slot in bucket.slots:
                if slot.fresh:  # no part of this rank's batch used the parameter
                    slot.view.zero_()
        self._launch(len(self._buckets))
        for bucket in self._buckets:
            assert bucket.finish is not None
            bucket.finish()
            for slot in bucket.slots:
                slot.main.value.grad = slot.view
        for main in self.mains:
            if main.value.grad is None:
                main.value.grad = torch.zeros_like(main.value)

    def squared_norm(self) -> Tensor:
        """Sum of squares of the gradients this rank owns, fp64 scalar on the device."""
        grads = [m.value.grad for m in self.mains if m.owned and m.value.grad is not None]
        if not grads:
            return torch.zeros((), dtype=torch.float64, device=self._comm.device)
        norms = torch.stack(torch._foreach_norm(grads)).double()
        return norms.square().sum()

    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient by a scalar of the device."""
        grads = [m.value.grad for m in self.mains if m.value.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))

    @torch.no_grad()
    def publish(self) -> None:
        """Copy updated master values into the model's parameters."""
        masters = [m for m in self.mains if m.is_master]
        if masters:
            params = [m.param[m.index] for m in masters]
            torch._foreach_copy_(params, [m.value for m in masters])

    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        """A gradient that autograd did not make, of one backward pass."""
        if param in self._slots:
            param.grad = grad
            self._take(param)
        elif param.grad is None:
            param.grad = grad
        else:
            param.grad += grad

    @torch.no_grad()
    def _take(self, param: Tensor) -> None:
        """Autograd hook: a gradient is complete for this microbatch."""
        grad = param.grad
        if grad is None:  # put off: it comes through ``add``
            return
        for slot in self._slots[param]:  # type: ignore[index]
            part = grad[slot.main.index]
            if slot.fresh:
                slot.view.copy_(part)
            else:
                slot.view.add_(part)
            slot.fresh, slot.missing = False, slot.missing - 1
        param.grad = None
        if self._overlap:
            self._launch_full()

    def _launch_full(self) -> None:
        """Reduce the buckets that are full, in the order that all ranks keep."""
        ready = self._next
        while ready < len(self._buckets) and self._buckets[ready].is_full:
            ready += 1
        self._launch(ready)

    def _launch(self, end: int) -> None:
        for bucket in self._buckets[self._next : end]:
            bucket.finish = self._comm.all_reduce(
                bucket.flat, name="gradients", group=bucket.ranks, wait=False
            )
        self._next = max(self._next, end)


def _main_param(local: LocalParam, piece: Piece, dtype: torch.dtype, *, owned: bool) -> MainParam:
    index = piece.box.within(local.box).slices()
    whole = piece.box == local.box and local.param.dtype == dtype
    value = local.param if whole else local.param.detach()[index].to(dtype, copy=True)
    return MainParam(
        spec=local.spec,
        box=piece.box,
        value=value,
        param=local.param,
        index=index,
        ranks=piece.ranks,
        owned=owned,
        uses=local.uses,
    )


def _fill_buckets(
    mains: Sequence[MainParam], dtype: torch.dtype, bucket_bytes: int
) -> list[_Bucket]:
    """Pack pieces, last used first as backward meets them, into buckets of one group each."""
    packed: dict[tuple[int, ...], list[list[MainParam]]] = {}
    room: dict[tuple[int, ...], int] = {}
    for main in reversed(mains):
        size = main.box.numel * dtype.itemsize
        if main.ranks not in packed or room[main.ranks] < size:
            packed.setdefault(main.ranks, []).append([])
            room[main.ranks] = bucket_bytes
        packed[main.ranks][-1].append(main)
        room[main.ranks] -= size
    return [_bucket(ranks, group, dtype) for ranks, groups in packed.items() for group in groups]


def _bucket(ranks: tuple[int, ...], mains: Sequence[MainParam], dtype: torch.dtype) -> _Bucket:
    sizes = [main.box.numel for main in mains]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=mains[0].param.device)
    views = torch.split(flat, sizes)
    bucket = _Bucket(ranks, flat)
    for main, view in zip(mains, views, strict=True):
        bucket.slots.append(_Slot(main, view.view(main.box.size)))
    return bucket
