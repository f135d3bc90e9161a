"""How far off a prediction may be: in its interval lie 8 of 10 runs that were predicted as blindly.

Widths are those of published runs that were left out with their family, kind of chip or year
(``python -m benchmarks.prediction --leave-out``), by how much of them no other run had; and those
of real plans on a machine with a profile of its own (``python -m benchmarks.real_plans``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

FILE = Path(__file__).with_name("intervals.json")
PART = 0.8
"""Of the runs that an interval is to hold."""
Quantity = Literal["time", "memory"]
Blind = Literal["profiled", "part", "nothing", "software", "chip"]
"""What no run had that was measured, the worst last; profiled: chips, links and software were
measured on the very machine; part: so they were, and ranks get parts of a core, in turns."""


class Interval(NamedTuple):
    """From the least to the most."""

    low: float
    high: float


@cache
def _times() -> Mapping[Quantity, Mapping[Blind, float]]:
    found: dict[Quantity, Mapping[Blind, float]] = json.loads(FILE.read_text("utf-8"))
    return found


def interval(quantity: Quantity, value: float, blind: Blind) -> Interval:
    """Around a prediction: as many times more as less."""
    times = _times()[quantity][blind]
    return Interval(value / times, value * times)
