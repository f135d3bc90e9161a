"""How a dimension of a tensor grows: which old element each new one is a copy of, and what copies
are multiplied by, so that the grown model computes what the old one does (FPI, arXiv 2110.07143).

A product reads ``m`` copies of an input with a share ``1 / m`` of the weight each. The stream from
layer to layer is divided by its mean square, so a channel of it that has ``m`` copies is written
``sqrt(new width / old width / m)`` times as large: the mean square is what it was, whatever the
widths are, and norms multiply by the inverse. Where every channel has as many copies that is 1.

Gradients of copies follow: of a weight that was multiplied by ``f`` and has ``m`` copies each has
``1 / (m f)`` of the old one, for the sum of weight times gradient over copies is what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from weft.models.decoder_spec import DecoderSpec

Role = Literal["made", "read", "scaled", "shifted"]
"""What a weight does with the elements of one of its dimensions: it makes them, its product adds
them up, or (a norm) it multiplies each, or is added to each of the result."""
STREAM = "d_model"
"""The dimension of what goes from layer to layer."""


@dataclass(frozen=True, eq=False)
class Along:
    """One dimension of one tensor. All its tensors are ``[new elements]``."""

    dim: int
    role: Role
    origin: Tensor
    """int64: the old element that each is a copy of."""
    num_copies: Tensor
    """fp64: of that one."""
    is_further: Tensor
    """It is not the first copy."""
    factor: Tensor
    """fp64: what a weight is multiplied by."""

    def rows(self, start: int, size: int) -> Along:
        """Some consecutive elements."""
        end = start + size
        return replace(
            self,
            origin=self.origin[start:end],
            num_copies=self.num_copies[start:end],
            is_further=self.is_further[start:end],
            factor=self.factor[start:end],
        )

    def after(self, start: int) -> Along:
        """Where the old elements before ``start`` are not there."""
        return replace(self, origin=self.origin - start)

    def shape_in(self, dims: int) -> tuple[int, ...]:
        """To multiply a tensor of so many dimensions by one of these."""
        return tuple(-1 if dim == self.dim else 1 for dim in range(dims))


def _gradient(along: Along) -> Tensor:
    return 1 / (along.num_copies * along.factor)


KINDS: Mapping[str, Callable[[Along], Tensor]] = MappingProxyType(
    {
        "param": lambda along: along.factor,
        "exp_avg": _gradient,
        "exp_avg_sq": lambda along: _gradient(along).square(),
        "momentum": _gradient,
    }
)
"""What a checkpoint holds of a parameter and copies are made of, with their factors: weights, means
of gradients, means of their squares."""


def taken(source: Tensor, along: Sequence[Along], kind: str) -> Tensor:
    """The grown tensor, fp64. ``source``: of the old model, of any dtype."""
    result = source.double()
    for each in along:
        result = result.index_select(each.dim, each.origin)
        result *= KINDS[kind](each).view(each.shape_in(result.ndim))
    return result


def copied(dim: int, role: Role, origin: Tensor, *, wider: float = 0, tied: bool = False) -> Along:
    """
    Args:
        dim: Of the tensor.
        role: Of its weight.
        origin: As in the result.
        wider: Of the stream alone: how many times as wide it is.
        tied: The table that makes the stream reads it too, so that shares cannot be there: they are
            here.
    """
    num_copies = torch.bincount(origin).double()[origin]
    size = (wider / num_copies).sqrt() if wider else torch.ones_like(num_copies)
    factors = {
        "made": size,
        "read": 1 / num_copies,
        "scaled": 1 / size,
        "shifted": torch.ones_like(size),
    }
    factor = factors[role] / (size * num_copies) if tied else factors[role]
    places = torch.arange(len(origin))
    first = torch.full_like(places, len(places)).scatter_reduce(0, origin, places, "amin")
    is_further = places != first[origin]
    return Along(dim, role, origin, num_copies, is_further, factor)


def origins(old: DecoderSpec, new: DecoderSpec) -> dict[str, Tensor]:
    """By name the dimensions that grow. Elements are copied in turn, so that numbers of copies
    differ by one at most; of heads whole ones, each beside a copy of its own key head."""
    found = {}
    for name, before, now in (
        (STREAM, old.d_model, new.d_model),
        ("d_ff", old.d_ff, new.d_ff),
    ):
        if before != now:
            found[name] = torch.arange(now) % before
    keys = torch.arange(new.num_kv_heads) % old.num_kv_heads
    heads = _heads(old, new)
    if (old.num_heads, old.num_kv_heads) != (new.num_heads, new.num_kv_heads):
        found |= {"heads": _channels(heads, old.d_head), "kv_heads": _channels(keys, old.d_head)}
    return found


def _heads(old: DecoderSpec, new: DecoderSpec) -> Tensor:
    """``[new heads]``: those that share an old key head, in turn over all copies of it."""
    before, now = old.num_heads // old.num_kv_heads, new.num_heads // new.num_kv_heads
    heads = torch.arange(new.num_heads)
    key, place = heads // now, heads % now
    copy, old_key = key // old.num_kv_heads, key % old.num_kv_heads
    return old_key * before + (copy * now + place) % before


def _channels(heads: Tensor, d_head: int) -> Tensor:
    return (heads[:, None] * d_head + torch.arange(d_head)).flatten()
