"""Loss spikes: which loss is far above those of the steps before it, by their median."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

LEAST_PART = 0.005
"""Of the median: what losses of a run that hardly moves are taken to differ by."""


@dataclass(frozen=True, slots=True)
class Spike:
    """A loss that is too high."""

    loss: float
    median: float
    deviation: float
    """Of the losses before: the median of how far they are from their median."""

    @property
    def facts(self) -> Mapping[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        times = (self.loss - self.median) / self.deviation
        before = f"{self.median:.4f} ± {self.deviation:.2g} before"
        return f"loss {self.loss:.4f}, {before}: a spike of {times:.3g} deviations"


class Spikes:
    """The last losses of a run. What is found depends on them alone.

    Args:
        window: How many are kept; nothing is a spike before half of them are.
        limit: How far above their median a loss is a spike, in median absolute deviations.
    """

    def __init__(
        self, window: int, limit: float, losses: Iterable[float] = (), *, is_high: bool = False
    ) -> None:
        self.losses = deque(losses, maxlen=window)
        self.is_high = is_high
        """The last one was a spike, or belongs to one."""
        self._least = max(window // 2, 1)
        self._limit = limit

    def add(self, loss: float) -> Spike | None:
        """The next step's, and the spike that begins with it. Losses that are no numbers are passed
        over. One that stays high is a spike no more once most of those before it are as high."""
        if not math.isfinite(loss):
            return None
        spike = self._spike(loss)
        begins, self.is_high = spike is not None and not self.is_high, spike is not None
        self.losses.append(loss)
        return spike if begins else None

    def _spike(self, loss: float) -> Spike | None:
        if len(self.losses) < self._least:
            return None
        median = statistics.median(self.losses)
        deviation = statistics.median(abs(each - median) for each in self.losses)
        deviation = max(deviation, LEAST_PART * abs(median))
        if deviation == 0:  # losses of nothing, such as of batches without weight, are no measure
            return None
        found = Spike(loss, median, deviation)
        return found if loss > median + self._limit * deviation else None
