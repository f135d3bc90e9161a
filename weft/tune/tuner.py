"""Which plan is tried next, why others are not, and when it is enough. Pure: no clock, no process.

After each trial what is left is ordered anew by how much of a step it is expected to save, and
what can no longer be best is dropped (``weft.tune.rules``). It is enough when that saving, over all
steps of the job, is less than a trial costs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import fmean

from weft.tune.belief import Belief, Guess, Lacking, Lesson, Seen, corrected
from weft.tune.candidate import Candidate, Holding
from weft.tune.rules import Ran, Short, why_short, why_slower

LEAST_GAIN = 0.001
"""Part of a step for which no trial is worth it, however long the job is."""
UNLIKELY = 0.1
"""What the saving of a plan counts that is likely to run out of memory."""
FEWEST_TO_TELL = 3
"""Trials that ran, before anything is said of single things."""
FIRST_COST_S = 20.0
"""Of a trial, before there was one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one trial."""

    candidate: int
    """Its number."""
    step_s: float | None
    """Of a step, as if the machine had always been as fast as in the first trial: how many times as
    long as the best took in the same turns, times what that took. None: it did not run."""
    times: float = 1.0
    """As long as the plan beside which it ran."""
    within: float = 0.0
    """Half of the 95 % interval of that, as a part."""
    against: int | None = None
    """The plan beside which it ran."""
    values: tuple[float, ...] = ()
    """Tokens per second of each turn."""
    beside: tuple[float, ...] = ()
    """Of the other plan in the same turns."""
    memory_gib: float = 0.0
    """Most that any rank held."""
    problem: str = ""
    short: int | None = None
    """The rank that ran out of memory."""
    cost_s: float = 0.0
    """From its start to its end."""


@dataclass(frozen=True, slots=True)
class Next:
    """The plan to try, or why there is none."""

    candidate: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Fate:
    """Of one plan."""

    kept: bool
    """It was tried and ran, or may still be."""
    why: str


@dataclass
class Tuner:
    """What is known so far.

    Args:
        times: As ``Belief``.
        steps: Of the job, which a better plan would make shorter.
        trials: Most of them; None: as many as are worth it.
    """

    candidates: Sequence[Candidate]
    times: float
    steps: int
    trials: int | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    chosen: int | None = None
    """The best by the last comparison, after it."""

    def settled(self, final: Sequence[Outcome]) -> Tuner:
        """With what the last comparison showed instead of what trials did: a step, and the turns
        that it comes of.

        Args:
            final: Of some that ran, the best first; several as ratios to it, which keep what the
                fastest of them took in its trial.
        """
        found = {each.candidate: each for each in final} if len(final) > 1 else {}
        both = [(o, found[o.candidate]) for o in self.ran if o.candidate in found]
        least_s, times = min(
            ((o.step_s or 0.0, last.times) for o, last in both), default=(1.0, 1.0)
        )
        outcomes = [
            replace(
                trial,
                step_s=least_s / times * last.times,
                times=last.times,
                within=last.within,
                against=last.against,
                values=last.values,
                beside=last.beside,
            )
            if (last := found.get(trial.candidate)) and trial.step_s is not None
            else trial
            for trial in self.outcomes
        ]
        return replace(self, outcomes=outcomes, chosen=final[0].candidate)

    @property
    def ran(self) -> list[Outcome]:
        """Those that ran."""
        return [outcome for outcome in self.outcomes if outcome.step_s is not None]

    @property
    def best(self) -> int | None:
        """The fastest that ran, or what the last comparison says."""
        if self.chosen is not None:
            return self.chosen
        ran = sorted(self.ran, key=lambda outcome: outcome.step_s or 0.0)
        return ran[0].candidate if ran else None

    @property
    def best_s(self) -> float:
        """Its step."""
        best = self.best
        return next(o.step_s for o in self.ran if o.candidate == best and o.step_s is not None)

    @property
    def cost_s(self) -> float:
        """Of a trial, about."""
        return fmean(o.cost_s for o in self.outcomes) if self.outcomes else FIRST_COST_S

    def name(self, number: int) -> str:
        """``trial 3``, or the plan's name where it was not tried."""
        tried = [outcome.candidate for outcome in self.outcomes]
        if number in tried:
            return f"trial {tried.index(number) + 1}"
        return self.candidates[number].name

    def belief(self) -> Belief:
        """What the trials say of all plans."""
        seen = [Seen(self.candidates[o.candidate], o.step_s or 0.0, o.within) for o in self.ran]
        return Belief(self.candidates, self.times, seen)

    def lessons(self) -> list[Lesson]:
        """What the forecast was wrong about, after trials enough to tell things apart."""
        return self.belief().lessons() if len(self.ran) >= FEWEST_TO_TELL else []

    def guesses(self) -> dict[int, Guess]:
        """Of plans that were not tried and may still be best."""
        belief, tried = self.belief(), {outcome.candidate for outcome in self.outcomes}
        left = (n for n in range(len(self.candidates)) if n not in tried and not self.dropped(n))
        return {number: belief.guess(self.candidates[number]) for number in left}

    def memory(self) -> dict[str, Lacking]:
        """How wrong predictions of memory were, by feature."""
        found = dict[str, Lacking]()
        for outcome in self.outcomes:
            for holding, is_short in self._told_of_memory(outcome):
                now = found.get(holding.feature, Lacking())
                if is_short:
                    times = holding.limit_bytes / holding.total
                    found[holding.feature] = Lacking(max(now.least, times), now.seen)
                else:
                    times = outcome.memory_gib * 2**30 / holding.total
                    found[holding.feature] = Lacking(now.least, max(now.seen, times))
        return found

    def _told_of_memory(self, outcome: Outcome) -> Iterator[tuple[Holding, bool]]:
        """Where it ran out; or the fullest, of which the most was measured."""
        memory = self.candidates[outcome.candidate].memory
        for holding in memory:
            if outcome.short in holding.ranks:
                yield holding, True
        if outcome.step_s is not None and outcome.memory_gib > 0:
            yield max(memory, key=lambda holding: holding.total), False

    def dropped(self, number: int) -> str:
        """Why a plan cannot be the best any more; empty where it may."""
        candidate = self.candidates[number]
        return why_short(candidate, self._shorts()) or why_slower(candidate, self._that_ran())

    def _shorts(self) -> Iterator[Short]:
        for outcome in self.outcomes:
            for holding, is_short in self._told_of_memory(outcome):
                if is_short:
                    yield Short(self.name(outcome.candidate), holding)

    def _that_ran(self) -> Iterator[Ran]:
        for outcome in self.ran:
            yield Ran(self.name(outcome.candidate), self.candidates[outcome.candidate].work)

    def next(self, *, time_left_s: float = inf) -> Next:
        """What to do now."""
        tried = {outcome.candidate for outcome in self.outcomes}
        for number, each in enumerate(self.candidates):
            if each.is_given and number not in tried:
                return Next(number, "your own plan")
        left = self.guesses()
        if why := self._why_not_on(left, time_left_s):
            return Next(None, why)
        memory = self.memory()
        unlikely = {n for n in left if corrected(memory, self.candidates[n])}
        if all(self.candidates[outcome.candidate].is_given for outcome in self.ran):
            first = min(left, key=lambda n: (n in unlikely, left[n].middle_s))
            return Next(first, "the best that is expected to run")
        return self._worth_most(left, unlikely)

    def _why_not_on(self, left: Mapping[int, Guess], time_left_s: float) -> str:
        if not left:
            return "every plan was tried or cannot be the best"
        if self.trials is not None and len(self.outcomes) >= self.trials:
            return f"all {self.trials} trials are done" if self.trials > 1 else "a trial is done"
        if self.ran and time_left_s < self.cost_s:
            return f"less time is left than a trial takes, {self.cost_s:.0f} s"
        return ""

    def _worth_most(self, left: Mapping[int, Guess], unlikely: Collection[int]) -> Next:
        """The plan that is expected to save most, where that is more than it costs."""
        worth = {
            number: guess.gain(self.best_s) * (UNLIKELY if number in unlikely else 1.0)
            for number, guess in left.items()
        }
        most = max(worth, key=lambda number: worth[number])
        saves_s = worth[most] * self.best_s * self.steps
        words = f"{worth[most]:.2%} of a step, {saves_s:.3g} s in {self.steps} steps"
        if worth[most] < LEAST_GAIN:
            return Next(None, f"no plan is expected to save more than {words}")
        if saves_s < self.cost_s:
            return Next(None, f"expected to save {words}; a trial costs {self.cost_s:.3g} s")
        return Next(most, f"expected to save {words}")

    def fates(self) -> dict[int, Fate]:
        """Of every plan: why it was kept or dropped."""
        found = {n: Fate(kept=False, why=self.dropped(n)) for n in range(len(self.candidates))}
        for outcome in self.outcomes:
            found[outcome.candidate] = self._fate(outcome)
        memory = self.memory()
        for number, guess in self.guesses().items():
            short = corrected(memory, self.candidates[number])
            why = f"not tried: expected to take {guess.middle_s:.4g} s +- {guess.deviation:.0%}"
            why += f"; likely to need {short}" if short else ""
            found[number] = Fate(kept=True, why=why)
        return found

    def _fate(self, outcome: Outcome) -> Fate:
        if outcome.step_s is None:
            return Fate(kept=False, why=outcome.problem)
        if outcome.candidate == self.best:
            return Fate(kept=True, why="the best")
        slower = outcome.step_s / self.best_s - 1
        if slower < 0:
            words = "faster in its trial, but not in the last comparison"
            return Fate(kept=False, why=f"{-slower:.1%} {words}")
        sure = "" if slower > outcome.within else ", which may be noise"
        return Fate(kept=not slower > outcome.within, why=f"{slower:.1%} slower{sure}")
