"""Errors on what no constant has seen: whole families, kinds of chip, or years left out.

Constants are chosen and fitted anew without each of them, by the records that are left alone. Those
left out are predicted with these, and with how far off the others were that were as little known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from benchmarks.prediction_fit import Fit, worth_having
from benchmarks.prediction_model import Constants, Predict
from benchmarks.published import Run
from weft.cost.rates import OTHER, chip_class

Apart = Literal["family", "chip", "year"]


def kind_of_chip(run: Run) -> str:
    """Its class; chips of no class are known by their names."""
    chip = min(run.chips, key=lambda chip: chip.peak_flops("bf16") or chip.peak_flops("fp16") or 0)
    found = chip_class(chip)
    return chip.name if found == OTHER else found


APART: Mapping[Apart, Callable[[Run], str]] = {
    "family": lambda run: run.group,
    "chip": kind_of_chip,
    "year": lambda run: str(run.year or "no year"),
}
"""What records have in common that are left out together."""


LEVELS = "nothing", "software", "chip"
"""What is unknown of a run, the worst last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A run, predicted from others."""

    run: Run
    fold: str
    predicted: float
    unknown: frozenset[str]
    """What of it no other record had: chip, software."""

    @property
    def error(self) -> float:
        """Relative and absolute."""
        return abs(self.predicted / self.run.measured - 1)

    @property
    def level(self) -> int:
        """Of ``LEVELS``."""
        return max((LEVELS.index(what) for what in self.unknown), default=0)

    @property
    def far(self) -> float:
        """Logarithm of how many times off it is."""
        return float(abs(np.log(self.predicted / self.run.measured)))


def left_out(runs: Sequence[Run], predict: Predict, around: Fit, by: Apart) -> Iterator[LeftOut]:
    """Every run, predicted with constants that were chosen and fitted without its fold.

    ``around``: the problem with all constants there may be.
    """
    folds = np.array([APART[by](run) for run in runs])
    for fold in np.unique(folds):
        rest = [run for run, label in zip(runs, folds, strict=True) if label != fold]
        if not rest:
            continue
        constants = chosen_and_fitted(rest, around.of(folds != fold))
        for run in (run for run, label in zip(runs, folds, strict=True) if label == fold):
            yield LeftOut(
                run=run,
                fold=str(fold),
                predicted=predict(run, constants),
                unknown=frozenset(unknown(run, rest)),
            )


def chosen_and_fitted(runs: Sequence[Run], around: Fit) -> Constants:
    """Those that are worth having by these runs alone, one step from the point of all."""
    kept = set(worth_having(runs, around))
    for name in [name for name in around.names if name not in kept]:
        around = around.without(name)
    return replace(around, at=around.at + around.step()).constants


def unknown(run: Run, rest: Sequence[Run]) -> Iterator[str]:
    """What of a run no other record had."""
    if kind_of_chip(run) not in {kind_of_chip(other) for other in rest}:
        yield "chip"
    if run.generation.name not in {other.generation.name for other in rest}:
        yield "software"


INSIDE = 0.8
"""Part of runs that an interval is to hold."""


def spread(known: Collection[LeftOut]) -> float:
    """How far off, as a logarithm, so many of the runs and of one more are at most (arXiv
    2107.07511, 1); each family counts the square root of its runs."""
    sizes: dict[str, int] = defaultdict(int)
    for one in known:
        sizes[one.run.group] += 1
    ordered = sorted(known, key=lambda one: one.far)
    weights = np.cumsum([sizes[one.run.group] ** -0.5 for one in ordered])
    at = int(np.searchsorted(weights, INSIDE * (weights[-1] + 1)))
    return ordered[min(at, len(ordered) - 1)].far


def spreads(known: Collection[LeftOut]) -> list[float]:
    """Likewise, of runs of which nothing is unknown, the software, or the chip. Less that is known
    makes none narrower, and where there is no such run, it is as wide as with more known."""
    found, widest = [], 0.0
    for level in range(len(LEVELS)):
        alike = [one for one in known if one.level == level]
        widest = max(widest, spread(alike) if alike else 0.0)
        found.append(widest)
    return found


def held_by_others(known: Sequence[LeftOut]) -> list[bool]:
    """Whether each run is in the interval that runs of other families give."""
    found = {
        group: spreads([one for one in known if one.run.group != group])
        for group in {one.run.group for one in known}
    }
    return [one.far <= found[one.run.group][one.level] for one in known]
