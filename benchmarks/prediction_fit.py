"""How the constants of ``prediction_model`` are fitted, and which of them are worth having.

The fit is a least-squares one on logarithms around the priors (Gauss-Newton; a record far off
counts less, for it was probably not what it says). A constant is kept where it helps records that
it was not fitted to: families left out whole, models left out of their families, runs of models.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.prediction_model import Constants, Predict, prior
from benchmarks.published import Run
from weft.cost.rates import chip_class

OUTLIER = 0.15
"""Logarithmic error at which a record counts half (Cauchy's weights)."""
NOISE = 0.04
"""Spread of the same plan on the same chips at two sites, about."""
FOLDS = 5
WORST = 0.3
"""Logarithmic errors beyond it are all the same to the choice of constants."""
WORTH = 0.0003
"""A constant has to lower the mean error of records left out by so much."""


@dataclass(frozen=True)
class Fit:
    """A least-squares problem around one point: what it takes to move the point, or to move it
    without some of the records or constants."""

    names: Sequence[str]
    at: np.ndarray
    slopes: np.ndarray
    errors: np.ndarray
    """Logarithms of measured over predicted."""
    weights: np.ndarray

    @property
    def constants(self) -> Constants:
        """The point."""
        return {name: float(np.exp(x)) for name, x in zip(self.names, self.at, strict=True)}

    def step(self) -> np.ndarray:
        """From the point to the best one, if all were linear."""
        return self._solved(*self._normal(np.ones(len(self.errors), dtype=bool)))

    def left_out(self, folds: np.ndarray) -> np.ndarray:
        """Errors of all records, each fold's with constants fitted to the other folds."""
        errors = np.empty_like(self.errors)
        for inside, step in self.steps_without(folds):
            errors[inside] = self.errors[inside] - self.slopes[inside] @ step
        return errors

    def steps_without(self, folds: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each fold's members, and the step that all the others ask for."""
        matrix, rest = self._normal(np.ones(len(self.errors), dtype=bool))
        for fold in np.unique(folds):
            inside = folds == fold
            less_matrix, less_rest = self._normal(inside)
            yield inside, self._solved(matrix - less_matrix, rest - less_rest)

    def _normal(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The chosen records' part of the normal equations."""
        robust = self.weights[chosen] / np.sqrt(1 + (self.errors[chosen] / OUTLIER) ** 2)
        rows = self.slopes[chosen] * robust[:, None]
        return rows.T @ rows, rows.T @ (self.errors[chosen] * robust)

    def _solved(self, matrix: np.ndarray, rest: np.ndarray) -> np.ndarray:
        start, spreads = _priors(self.names)
        rest = rest + (start - self.at) * spreads**-2
        return np.clip(np.linalg.solve(matrix + np.diag(spreads**-2), rest), -0.7, 0.7)

    def of(self, chosen: np.ndarray) -> Fit:
        """The chosen records alone."""
        return replace(
            self,
            slopes=self.slopes[chosen],
            errors=self.errors[chosen],
            weights=self.weights[chosen],
        )

    def without(self, name: str) -> Fit:
        """The constant stays at its prior."""
        column = list(self.names).index(name)
        back = float(np.log(prior(name)[0])) - self.at[column]
        rest = np.arange(len(self.names)) != column
        return Fit(
            [one for one in self.names if one != name],
            self.at[rest],
            self.slopes[:, rest],
            self.errors - self.slopes[:, column] * back,
            self.weights,
        )


def _priors(names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    known = [prior(name) for name in names]
    return np.log([value for value, _ in known]), np.array([spread for _, spread in known])


def problem(runs: Sequence[Run], predict: Predict, start: Constants, names: Sequence[str]) -> Fit:
    """The problem of fitting some constants, around a start."""
    groups = Counter(run.group for run in runs)
    weights = np.array([groups[run.group] ** -0.25 for run in runs]) / NOISE
    at = np.array([np.log(start.get(name, prior(name)[0])) for name in names])
    now = _logs(runs, predict, names, at)
    slopes = _slopes(runs, predict, names, at, now)
    return Fit(names, at, slopes, np.log([run.measured for run in runs]) - now, weights)


def fit(
    runs: Sequence[Run],
    predict: Predict,
    start: Constants,
    names: Sequence[str],
    *,
    rounds: int,
) -> Constants:
    """Fit the named constants; all others stay at their priors."""
    for _ in range(rounds):
        around = problem(runs, predict, start, names)
        start = replace(around, at=around.at + around.step()).constants
    return start


def families(runs: Sequence[Run]) -> np.ndarray:
    """Folds that leave out a family each."""
    return np.array([run.group for run in runs])


def models(runs: Sequence[Run]) -> np.ndarray:
    """Folds that leave out some models of every family."""
    keys = [f"{run.group} {run.job.shape.num_layers} {run.job.shape.d_model}" for run in runs]
    return np.array([zlib.crc32(key.encode()) % FOLDS for key in keys])


def plans(runs: Sequence[Run]) -> np.ndarray:
    """Folds that leave out some runs of every model."""
    return np.array([zlib.crc32(run.name.encode()) % FOLDS for run in runs])


def worth_having(runs: Sequence[Run], around: Fit) -> list[str]:
    """Names of the constants that are left when none can go without loss to records left out."""
    folds = [families(runs), models(runs), plans(runs)]
    groups = Counter(run.group for run in runs)
    weights = np.array([groups[run.group] ** -0.5 for run in runs])

    def loss(of: Fit) -> float:
        far = [np.minimum(np.abs(of.left_out(fold)), WORST) for fold in folds]
        return float(np.average(np.mean(far, axis=0), weights=weights))

    best = loss(around)
    while around.names:
        smaller = {name: around.without(name) for name in around.names}
        losses = {name: loss(one) for name, one in smaller.items()}
        least = min(losses, key=losses.__getitem__)
        if losses[least] > best + WORTH:
            break
        around, best = smaller[least], losses[least]
    return list(around.names)


def without_each(around: Fit, folds: np.ndarray) -> Iterator[tuple[np.ndarray, Constants]]:
    """Members of a fold, and constants fitted to all others by one step from the point of all."""
    for inside, step in around.steps_without(folds):
        yield inside, replace(around, at=around.at + step).constants


def _logs(
    runs: Sequence[Run], predict: Predict, names: Sequence[str], at: np.ndarray
) -> np.ndarray:
    constants = dict(zip(names, np.exp(at).tolist(), strict=True))
    return np.log([predict(run, constants) for run in runs])


def _slopes(
    runs: Sequence[Run],
    predict: Predict,
    names: Sequence[str],
    at: np.ndarray,
    now: np.ndarray,
) -> np.ndarray:
    """By record and constant, as differences; only where the record depends on the constant."""
    small = 0.01
    result = np.zeros((len(runs), len(names)))
    constants = dict(zip(names, np.exp(at).tolist(), strict=True))
    for column, name in enumerate(names):
        owner = name.split(".")[1]
        changed = {**constants, name: constants[name] * float(np.exp(small))}
        for row, run in enumerate(runs):
            owners = {"all", *(chip_class(chip) for chip in run.chips)}
            if owner in owners:
                result[row, column] = (np.log(predict(run, changed)) - now[row]) / small
    return result
