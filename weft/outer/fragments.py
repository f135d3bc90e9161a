"""Which parameters meet when: arithmetic, the same on every rank.

A fragment is whole units of the model, and fragments are about as large. They begin at even
distances within every round of steps, so that a slow link always has one to carry
(arXiv 2501.18512).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.model import ParamSpec, UnitName


def fragments_of(specs: Sequence[ParamSpec], number: int) -> list[list[ParamSpec]]:
    """The trained parameters apart by fragment: largest units first, each to the smallest one."""
    sizes: dict[UnitName, int] = {}
    for spec in specs:
        if spec.trainable:
            sizes[spec.unit] = sizes.get(spec.unit, 0) + spec.numel
    loads, place = [0] * number, dict[UnitName, int]()
    for unit in sorted(sizes, key=lambda unit: -sizes[unit]):  # stable: equal ones in order
        place[unit] = loads.index(min(loads))
        loads[place[unit]] += sizes[unit]
    return [
        [spec for spec in specs if spec.trainable and place[spec.unit] == fragment]
        for fragment in range(number)
    ]


@dataclass(frozen=True, slots=True)
class Rounds:
    """When fragments begin to meet, and when what came of it is used."""

    every: int
    delay: int
    fragments: int

    def begins(self, step: int) -> list[int]:
        """Fragments whose outer gradients leave after this step; the last one ends a round."""
        ends = (self.every * (number + 1) // self.fragments for number in range(self.fragments))
        return [n for n, end in enumerate(ends) if step > 0 and (step - end) % self.every == 0]

    def lands(self, step: int) -> list[int]:
        """Fragments that become one after this step."""
        return self.begins(step - self.delay)
