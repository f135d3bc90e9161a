"""What goes from one rank to one of another site when a fragment meets: bytes, packed and unpacked.

First the weight of the sender's site, then the scales of all rows, where the code has some, then
the codes of all parts, each as the wire has it. Both ends know the parts and their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from weft.outer.trades import Trade
from weft.outer.wire import Wire, by_rows, num_rows
from weft.parallel.mains import MainParam

HEAD = torch.float64.itemsize
"""Bytes before scales and codes: the weight of the sender's site."""
SCALE = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of one of this rank's parameters that it shares with a rank of another site."""

    place: int
    """Of the parameter, among those of its fragment that this rank owns."""
    slices: tuple[slice, ...]
    """In what the rank owns."""
    size: tuple[int, ...]


def parts_by_rank(
    of_fragment: Iterable[Trade], mains: Sequence[MainParam], *, sent: bool
) -> Mapping[int, Sequence[Part]]:
    """What this rank, which owns ``mains`` of a fragment, sends to others or receives from them."""
    found: dict[int, list[Part]] = {}
    for trade in of_fragment:
        place, main = next(
            (n, main)
            for n, main in enumerate(mains)
            if main.spec.name == trade.name and main.box.contains(trade.box)
        )
        part = Part(place, trade.box.within(main.box).slices(), trade.box.size)
        found.setdefault(trade.dst if sent else trade.src, []).append(part)
    return found


def size_of(wire: Wire, parts: Sequence[Part]) -> int:
    """Bytes of a message."""
    codes = sum(prod(part.size) for part in parts) * wire.dtype.itemsize
    return _codes_at(wire, parts) + codes


def pack(
    parts: Sequence[Part],
    *,
    weight: Tensor,
    codes: Sequence[Tensor],
    scales: Sequence[Tensor | None],
) -> Tensor:
    """``codes`` and ``scales``: of each parameter of the fragment that this rank owns."""
    rows = [
        found[part.slices[0]] if len(part.size) > 1 else found
        for part in parts
        if (found := scales[part.place]) is not None
    ]
    values = [codes[part.place][part.slices].reshape(-1) for part in parts]
    pieces = [weight.reshape(1), *rows, *values]
    return torch.cat([piece.to(weight.device).view(torch.uint8) for piece in pieces])


def unpack(wire: Wire, parts: Sequence[Part], message: Tensor, rooms: Sequence[Tensor]) -> Tensor:
    """Write what came into ``rooms``, one for each parameter; the weight of the sender's site."""
    scale_at, code_at = HEAD, _codes_at(wire, parts)
    for part in parts:
        scales = None
        if wire.has_scales:
            end = scale_at + SCALE * num_rows(part.size)
            scales = by_rows(message[scale_at:end].view(torch.float32), part.size)
            scale_at = end
        end = code_at + wire.dtype.itemsize * prod(part.size)
        codes = message[code_at:end].view(wire.dtype).view(part.size)
        room = rooms[part.place][part.slices]
        room.copy_(wire.decode(codes, scales, room.dtype))
        code_at = end
    return message[:HEAD].view(torch.float64)[0]


def _codes_at(wire: Wire, parts: Sequence[Part]) -> int:
    return HEAD + SCALE * sum(num_rows(part.size) for part in parts) * wire.has_scales
