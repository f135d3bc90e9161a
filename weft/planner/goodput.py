"""Where chips fail: how much of its time a job trains, how often to save for that, on which nodes.

More chips make a step faster and fail more often; at some number they train less. What a failure
costs is the work since the last save and the time to begin again; what saves cost is their time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, expm1, inf, isfinite

from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError
from weft.planner.problem import Problem
from weft.planner.search import Candidate, Found, Watch
from weft.planner.some_nodes import ByCost, some_nodes

USUAL_HOURS = 50_000.0
"""Of a chip with its part of the node until it fails, where a pool does not say: 16,384 H100 had
419 unexpected interruptions in 54 days (Llama 3, arXiv 2407.21783, section 3.3.4)."""
USUAL_RESTART_S = 120.0
"""From a failure until ranks compute again, where nobody says."""
DAY_S = 24 * 3600.0
"""No start takes longer."""
HALVINGS = 60
MOST = 500.0
"""Failures expected in the time of a step, from which on none is ever done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """What a job meets: failures come one by one, whenever the last one was, also at a restart."""

    rate: float
    """A second, of all chips."""
    save_s: float
    """That a save holds up the steps."""
    restart_s: float

    def step_s(self, step_s: float, every: int) -> float:
        """Expected seconds for each step that stays done, where each ``every`` are saved.

        J. Daly, A higher order estimate of the optimum checkpoint interval (2006), section 2.
        """
        work_s = every * step_s + self.save_s
        if self.rate * (self.restart_s + work_s) > MOST:
            return inf
        often = exp(self.rate * self.restart_s) * expm1(self.rate * work_s)
        return often / self.rate / every

    def every(self, step_s: float) -> int:
        """Steps from save to save with which that is least.

        Where the derivative of ``step_s`` by the seconds T between saves is zero, with x = T times
        the rate: ``(1 - x) exp(x) = exp(-rate save_s)``.
        """
        low, high, wanted = 0.0, 1.0, exp(-self.rate * self.save_s)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if (1 - middle) * exp(middle) > wanted else (low, middle)
        near = max(1, int(low / self.rate / step_s))
        return min(near, near + 1, key=lambda every: self.step_s(step_s, every))

    def expected_s(self, step_s: float) -> float:
        """Seconds for each step that stays done, saved as often as is best."""
        return self.step_s(step_s, self.every(step_s))


@dataclass(frozen=True, kw_only=True)
class MostTrained(ByCost):
    """Nodes on which most is trained, and how."""

    failures: Failures

    @property
    def step_s(self) -> float:
        """Without failures."""
        return self.chosen.found.best.time.step_s

    @property
    def goodput(self) -> float:
        """Part of the time in which what is computed stays done."""
        return self.step_s / self.chosen.cost

    def sentences(self) -> Iterator[str]:
        """For people."""
        for words, pool in zip(self.chosen.taken(), self.chosen.asked.pools, strict=True):
            yield f"{words}; a chip fails every {_shown(_hours(pool))} hours{_said(pool)}"
        every = self.failures.every(self.step_s)
        yield (
            f"a failure every {_shown(1 / self.failures.rate / 3600)} hours, "
            f"{self.failures.restart_s:g} s to begin again; a save holds up steps for "
            f"{self.failures.save_s:.2g} s at most: checkpoint.every={every}, each "
            f"{_shown(every * self.step_s / 60, digits=2)} minutes"
        )
        yield (
            f"{self.tokens / self.chosen.cost:,.0f} tokens/s stay done, {self.goodput:.1%} of what "
            f"the plan does; the most of {self.chosen.choice}, and none can do more than "
            f"{self.tokens / self.chosen.least:,.0f}"
        )

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {
            "by": "goodput",
            "goodput": self.goodput,
            "tokens_s": self.tokens / self.chosen.cost,
            "most_tokens_s": self.tokens / self.chosen.least,
            "checkpoint_every": self.failures.every(self.step_s),
            "hours_to_failure": 1 / self.failures.rate / 3600,
            "save_s": self.failures.save_s,
            "restart_s": self.failures.restart_s,
            **self.chosen.as_json(),
        }


@dataclass(frozen=True, slots=True)
class _Expected:
    """Seconds for each step that stays done."""

    problem: Problem
    restart_s: float

    def least(self, taken: ClusterView, step_s: float) -> float:
        """With saves that take no time."""
        lost = self._failures(taken, 0.0).rate * self.restart_s
        return step_s * exp(lost) if lost < MOST else inf

    def of(self, taken: ClusterView, best: Candidate) -> float:
        return self.met(taken, best).expected_s(best.time.step_s)

    def met(self, taken: ClusterView, best: Candidate) -> Failures:
        """A save copies what a rank keeps to its host; Weft does that beside the next step, so that
        it takes less than this."""
        took = []
        for rank, memory in best.memory.items():
            rate = self.problem.knowledge.hardware_of(best.cluster.pool_of(rank)).tiers.host
            took.append((memory.weights + memory.optimizer) / rate)
        return self._failures(taken, max(took))

    def _failures(self, taken: ClusterView, save_s: float) -> Failures:
        rate = sum(pool.num_chips / (3600 * _hours(pool)) for pool in taken.pools)
        return Failures(rate=rate, save_s=save_s, restart_s=self.restart_s)


def most_trained(
    problem: Problem, restart_s: float, *, watch: Watch | None = None
) -> tuple[MostTrained, Found]:
    """``some_nodes`` on which most steps stay done.

    Raises:
        ConfigError: chips fail so often that none does.
        NoPlan: not even all nodes hold the model.
    """
    most_s = MOST * 3600 * max(map(_hours, problem.cluster.pools))
    if restart_s > max(most_s, DAY_S):
        often = f"at most {most_s:.3g} s, in which even the surest chip fails {MOST:g} times"
        raise ConfigError("--restart", restart_s, often)
    expected = _Expected(problem, restart_s)
    chosen = some_nodes(problem, expected, watch=watch)
    if not isfinite(chosen.cost):
        given = [pool.mtbf_hours for pool in problem.cluster.pools]
        enough = "enough hours for a step to be done between failures"
        raise ConfigError("pools.mtbf_hours", given, enough, "They are of one chip.")
    tokens = problem.workload.samples * problem.workload.seq_len
    failures = expected.met(chosen.cluster, chosen.found.best)
    return MostTrained(chosen=chosen, failures=failures, tokens=tokens), chosen.found


def _hours(pool: ChipPool) -> float:
    return USUAL_HOURS if pool.mtbf_hours is None else pool.mtbf_hours


def _shown(number: float, *, digits: int = 3) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.{digits}g}"


def _said(pool: ChipPool) -> str:
    return "" if pool.mtbf_hours is not None else " (taken for it; mtbf_hours says better)"
