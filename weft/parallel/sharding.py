"""Parameters that arrive just in time: gathered before a module computes, freed after it (ZeRO).

A unit is what is gathered together: the embedding, one block, or the final norm with the head. At
levels 1 and 2 a unit only waits for what the last update sent; at level 3 it gathers before its
forward and before its backward, the next unit's while it computes, and frees all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from weft.models.decoder import Decoder
from weft.parallel.mains import FlatParams
from weft.parallel.params import parts_of
from weft.plan.model import Part


@dataclass(slots=True, eq=False)
class Unit:
    """Parameters of one stage that are used together."""

    flats: Sequence[FlatParams]
    crew: list[Unit] = field(repr=False)
    """All units of this rank."""
    after: Unit | None = None
    """The next in forward order, in the same stage."""
    before: Unit | None = None

    def enter_forward(self) -> None:
        """What follows computes with these parameters, up to the next unit."""
        self._enter(self.after)

    def enter_backward(self) -> None:
        """The gradient of the output is here, so whatever came after this unit is done."""
        self._enter(self.before)

    def _enter(self, coming: Unit | None) -> None:
        soon = () if coming is None else coming.flats
        for other in self.crew:
            for flat in other.flats:
                if flat not in self.flats and flat not in soon:
                    flat.free()
        for flat in self.flats:
            flat.wait()
        for flat in soon:
            flat.start()


def _announce(result: Tensor, unit: Unit) -> None:
    """The backward of what made ``result`` begins by gathering the unit."""
    if result.requires_grad:
        result.register_hook(lambda _: unit.enter_backward())  # type: ignore[no-untyped-call]


class Gathered(nn.Module):
    """A block whose parameters are there while it computes."""

    def __init__(self, block: nn.Module, unit: Unit) -> None:
        super().__init__()
        self.block = block
        self._unit = unit

    def forward(self, *args: Any) -> Tensor:
        self._unit.enter_forward()
        result: Tensor = self.block(*args)
        _announce(result, self._unit)
        return result


def _units_of(
    parts: Sequence[Part], flats: Sequence[FlatParams], crew: list[Unit]
) -> dict[Part, Unit]:
    """The units of one stage by part, in forward order; they join the rank's ``crew``."""
    units = {}
    for part in parts:
        used = [f for f in flats if any(part in parts_of(e.held.spec) for e in f.bucket.entries)]
        units[part] = Unit(used, crew)
    for (part, first), (_, second) in pairwise(units.items()):
        first.after = second
        if part != "embed":  # its backward does without its parameters
            second.before = first
    crew += units.values()
    return units


class Attendance:
    """Takes part in what a stage gathers when this rank has no samples of a microbatch."""

    def __init__(self, units: Mapping[Part, Unit]) -> None:
        self._units = units

    def forward(self) -> None:
        for unit in self._units.values():
            unit.enter_forward()

    def backward(self) -> None:
        for part, unit in reversed(list(self._units.items())):
            if part != "embed":
                unit.enter_backward()


def gather_in_time(model: Decoder, flats: Sequence[FlatParams], crew: list[Unit]) -> Attendance:
    """Let every module of a stage wait for its parameters. Applied last, outside compiled code."""
    layers: list[Part] = [int(name) for name in model.layers]
    first: list[Part] = ["embed"] if model.takes_tokens else []
    last: list[Part] = ["head"] if model.norm is not None else []
    units = _units_of([*first, *layers, *last], flats, crew)
    for name, block in model.layers.items():
        model.layers[name] = Gathered(block, units[int(name)])
    if model.takes_tokens:
        assert model.embed is not None
        embed = units["embed"]
        model.embed.register_forward_pre_hook(lambda *_: embed.enter_forward())
    if model.norm is not None:
        head = units["head"]
        model.norm.register_forward_pre_hook(lambda *_: head.enter_forward())
        model.norm.register_forward_hook(lambda _module, _given, hidden: _announce(hidden, head))
        model.cross_entropy.register_forward_hook(
            lambda _module, _given, loss: _announce(loss, head)
        )
    return Attendance(units)
