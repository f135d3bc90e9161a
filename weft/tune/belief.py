"""How long plans take that were not tried, from those that were and from the forecast.

The forecast is the prior. Trials then say how wrong it is: for all plans alike, for each thing in
proportion to the part of a step that goes with it (``Candidate.leans``), and for each plan by
itself. All are normal in the logarithm of time, so that what is known after some trials follows in
closed form (Bayesian linear regression). How wide all of that is follows from trials, too: where
they are further off than the forecast's interval has it, everything is as much less sure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import erf, exp, log, sqrt
from typing import TYPE_CHECKING, Any

from weft.tune.candidate import Candidate

if TYPE_CHECKING:
    import numpy as np

    FloatArray = np.ndarray[Any, np.dtype[np.float64]]

HAS = 0.7
"""How far off, as a part of a step, predictions may be of what a plan has that others lack."""
OWN = 0.03
"""And of one plan by itself: what nothing else explains."""
ASSUMED = 2.0
"""So many trials the width of the forecast's own interval counts for."""
OF_NORMAL = 1.2816
"""So many deviations hold 80 % of a normal distribution."""
OF_INTERVAL = 1.96
"""And so many 95 %."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A plan that was measured."""

    candidate: Candidate
    step_s: float
    within: float
    """Half of the 95 % interval, as a part."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Of a plan's step: normal in its logarithm."""

    middle_s: float
    deviation: float
    """Of the logarithm: about a part of the step."""

    def gain(self, best_s: float) -> float:
        """What part of ``best_s`` it is expected to save, where it counts as nothing to lose."""
        if self.deviation <= 0:
            return max(0.0, 1 - self.middle_s / best_s)
        above = log(self.middle_s / best_s)
        z = -above / self.deviation
        shorter = exp(above + self.deviation**2 / 2) * _below(z - self.deviation)
        return max(0.0, _below(z) - shorter)


@dataclass(frozen=True, slots=True)
class Lesson:
    """How wrong the forecast was about one thing."""

    about: str
    times: float
    """As long as predicted it takes."""
    within: float
    """Half of a 95 % interval, as a part."""


def _below(z: float) -> float:
    return (1 + erf(z / sqrt(2))) / 2


class Belief:
    """What is known after some trials.

    Args:
        candidates: All that will be asked about, or were seen.
        times: In so many times more or less 80 % of forecasts are right (``weft.cost.interval``).
    """

    def __init__(self, candidates: Sequence[Candidate], times: float, seen: Sequence[Seen]) -> None:
        import numpy as np  # what commands that answer at once do without

        things = sorted({thing for each in candidates for thing in each.leans})
        usual = log(times) / OF_NORMAL
        self._things = things
        own = {thing for each in candidates for thing in each.leans if _is_had(thing, candidates)}
        spread = [usual, *(HAS * usual if thing in own else usual for thing in things)]
        prior = np.diag(np.square(spread))
        rows = np.array([self._row(each.candidate) for each in seen]).reshape(-1, len(spread))
        off = np.array([log(each.step_s / each.candidate.predicted_s) for each in seen])
        noise = np.array([(each.within / OF_INTERVAL) ** 2 for each in seen])
        believed = rows @ prior @ rows.T + np.diag(np.full(len(seen), OWN**2))
        self._wider = _wider(believed + np.diag(noise), off)
        cross = self._wider * prior @ rows.T
        inverse = np.linalg.inv(self._wider * believed + np.diag(noise))
        self._mean: FloatArray = cross @ inverse @ off
        self._spread: FloatArray = self._wider * prior - cross @ inverse @ cross.T

    def _row(self, candidate: Candidate) -> list[float]:
        return [1.0, *(candidate.leans.get(thing, 0.0) for thing in self._things)]

    def guess(self, candidate: Candidate) -> Guess:
        """Of a plan that was not tried."""
        import numpy as np

        row = np.array(self._row(candidate))
        deviation = sqrt(max(0.0, float(row @ self._spread @ row)) + self._wider * OWN**2)
        return Guess(candidate.predicted_s * exp(float(row @ self._mean)), deviation)

    def lessons(self) -> list[Lesson]:
        """What the forecast was wrong about, beyond doubt; the worst first."""
        names = ["everything", *self._things]
        found = []
        for number, name in enumerate(names):
            mean = float(self._mean[number])
            within = OF_INTERVAL * sqrt(max(0.0, float(self._spread[number, number])))
            if abs(mean) > within:
                found.append(Lesson(name, exp(mean), within))
        return sorted(found, key=lambda lesson: -abs(log(lesson.times)))


def _wider(believed: FloatArray, off: FloatArray) -> float:
    """Times as large as believed variances are: the mean of an inverse gamma, for which the
    interval counts as ``ASSUMED`` trials; never less than 1. How far off all trials are alike says
    nothing of how far apart they are."""
    import numpy as np

    if len(off) < 2:
        return 1.0
    both = np.linalg.solve(believed, np.stack([np.ones(len(off)), off], axis=1))
    weights, weighed = both[:, 0], both[:, 1]
    apart = off - weights @ off / weights.sum()
    return max(1.0, (ASSUMED + float(apart @ weighed)) / (ASSUMED + len(off) - 1))


def _is_had(thing: str, candidates: Sequence[Candidate]) -> bool:
    """Plans have it or not; it is no amount."""
    return all(each.leans.get(thing, 1.0) == 1.0 for each in candidates)


@dataclass(frozen=True, slots=True)
class Lacking:
    """What trials said of a feature's memory."""

    least: float = 0.0
    """It takes more than so many times what is predicted, for with that it ran out."""
    seen: float = 0.0
    """Of what ran: most that was measured, over what was predicted; 0 where nothing ran."""

    @property
    def times(self) -> float:
        """As much as predicted it takes."""
        return max(self.least, self.seen or 1.0)


def corrected(memory: Mapping[str, Lacking], candidate: Candidate) -> str:
    """Where a plan is likely to run out of memory after all, in words; empty where it is not.

    ``memory``: by ``Holding.feature``.
    """
    for holding in candidate.memory:
        times = memory.get(holding.feature, Lacking()).times
        if times * holding.total > holding.limit_bytes:
            need, room = (each / 2**30 for each in (holding.total, holding.limit_bytes))
            return f"{times:.2f} times {need:.2g} of {room:.2g} GiB on {holding.feature}"
    return ""
