"""The axes of a stage's mesh: the one table that names them to people.

An entry adds an axis to the configuration, to plans and to their checks. What the axis divides, and
into what, is said in ``weft.axes``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisEntry:
    """One axis, as a configuration and a plan name it."""

    name: str
    manual: str
    """What its size means, in the words of a manual."""
    divides_samples: bool = False
    """Ranks along it compute different samples; along the others they share the same ones."""
    missing: str = ""
    """Why this version refuses sizes above 1; empty where it runs them."""


ENTRIES = (
    AxisEntry(
        name="dp",
        manual="Ways to divide the samples of a micro-batch; every rank computes its part.",
        divides_samples=True,
    ),
    AxisEntry(name="cp", manual="", missing="Context parallelism is not run by this version."),
    AxisEntry(
        name="tp",
        manual="Ways to split each matrix product; keep these ranks inside one machine.",
    ),
)
"""Outermost first by default."""

NAMES = tuple(entry.name for entry in ENTRIES if not entry.missing)
"""Of the axes that this version runs."""

SAMPLE_AXES = tuple(entry.name for entry in ENTRIES if entry.divides_samples)
