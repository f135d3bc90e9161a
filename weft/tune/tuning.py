"""A tuning from its first question to the planner to the plan that is best, however often killed
and started again in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile

from weft.config.errors import ConfigError
from weft.mix.turns import Say
from weft.train.run_folder import write_text
from weft.tune.candidate import likeness
from weft.tune.job import Job
from weft.tune.record import Record
from weft.tune.trials import Best, Ratio, Trials, ratio
from weft.tune.tuner import Outcome, Tuner

BEST_PLAN = "best-plan.json"
"""In the folder: the best plan so far."""
RIVALS = 1
"""Plans besides the best and the first that are in the last comparison."""
ROOM_BYTES = 1 << 20
"""On the disk, below which a trial may have failed for want of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When it ends at the latest."""

    minutes: float
    trials: int | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What is known, at the end or before."""

    tuner: Tuner
    final: tuple[Outcome, ...]
    """Of the last comparison, the first of which is the best; empty before it."""
    why: str
    """It ended; empty before."""
    used_s: float

    @property
    def best(self) -> int:
        """The plan to take."""
        best = self.final[0].candidate if self.final else self.tuner.best
        assert best is not None, "nothing ran"
        return best

    @property
    def gain(self) -> Ratio | None:
        """How many times as long the first plan that ran takes: the user's own, or the planner's
        choice; None where it is the best."""
        first = self.tuner.ran[0].candidate
        return next(
            (Ratio(o.times, o.within) for o in self.final if o.candidate == first != self.best),
            None,
        )


class Tuning:
    """One start of the command.

    Args:
        show: Told after each trial, and at the end.
    """

    def __init__(
        self, job: Job, record: Record, limits: Limits, say: Say, show: Callable[[Result], None]
    ) -> None:
        self._job, self._record, self._limits = job, record, limits
        self._say, self._show = say, show
        self._before_s, self._began_s = record.used_s, time.monotonic()

    @property
    def _used_s(self) -> float:
        """Of all starts."""
        return self._before_s + time.monotonic() - self._began_s

    def run(self) -> Result:
        """To the end.

        Raises:
            NoPlan: there is nothing to try.
            ConfigError: no plan runs.
        """
        record = self._record
        record.begin()
        if not record.candidates:
            self._ask()
        tuner = Tuner(
            record.candidates,
            times=record.times,
            steps=self._job.config.train.steps,
            trials=self._limits.trials,
            outcomes=record.outcomes,
        )
        todo = tuner.next(time_left_s=self._left_s)
        if todo.candidate is None and record.final:
            return self._told(self._result(tuner, todo.why))
        folder = self._new_folder()
        with Trials(self._job.setting(folder), self._say) as trials:
            while todo.candidate is not None:
                self._try(trials, tuner, todo.candidate, todo.why)
                todo = tuner.next(time_left_s=self._left_s)
            if tuner.best is None:
                last = record.outcomes[-1].problem if record.outcomes else todo.why
                expected = "chips on which some plan runs"
                name, where = record.candidates[0].name, f"What it said is in {folder}."
                raise ConfigError("plan", name, expected, f"The last trial: {last}. {where}")
            trials.say(todo.why)
            self._compare(trials, tuner)
        return self._told(self._result(tuner, todo.why))

    def _told(self, result: Result) -> Result:
        """With the best plan in the folder, whatever is there of an earlier start."""
        plan = result.tuner.candidates[result.best].plan
        write_text(self._record.file.parent / BEST_PLAN, plan.to_json())
        self._show(result)
        return result

    @property
    def _left_s(self) -> float:
        return 60 * self._limits.minutes - self._used_s

    def _ask(self) -> None:
        space, given = self._job.space, self._job.given

        def tell(done: int, of: int) -> None:
            if done == of or done % 4 == 0:
                self._say(f"asked the planner {done} of {of} questions")

        candidates = space.candidates(tell, lambda: self._left_s <= 0)
        if given is not None:
            own = self._job.candidate_of(given)
            candidates = [
                own,
                *(
                    c
                    for c in candidates
                    if likeness(c) != likeness(own) or c.predicted_s < own.predicted_s
                ),
            ]
        self._say(f"{len(candidates)} unlike plans to choose from")
        self._record.add_plans(candidates, self._job.times, self._used_s)

    def _new_folder(self) -> Path:
        folders = (self._record.file.parent / f"trials{number}" for number in count(1))
        return next(folder for folder in folders if not folder.exists())

    def _try(self, trials: Trials, tuner: Tuner, number: int, why: str) -> None:
        trials.say(f"trial {len(tuner.outcomes) + 1}: {why}")
        outcome = trials.run(number, tuner.candidates[number], self._best(tuner))
        if outcome.step_s is None:
            _refuse_full(trials.out)
        self._record.add(outcome, self._used_s)
        trials.say(in_words(outcome))
        if tuner.best is not None:
            self._told(self._result(tuner, ""))

    @staticmethod
    def _best(tuner: Tuner) -> Best | None:
        if tuner.best is None:
            return None
        outcome = next(o for o in tuner.ran if o.candidate == tuner.best)
        return Best(tuner.best, tuner.candidates[tuner.best], outcome)

    def _compare(self, trials: Trials, tuner: Tuner) -> None:
        """The best, the first and the nearest rival once more: in trials chance has chosen, too."""
        ran = sorted(tuner.ran, key=lambda outcome: outcome.step_s or 0.0)
        wanted = [*ran[: 1 + RIVALS], tuner.ran[0]]
        several = [Best(o.candidate, tuner.candidates[o.candidate], o) for o in wanted]
        several = list({each.number: each for each in several}.values())
        found = list[Outcome]()
        if len(several) > 1:
            names = "; ".join(tuner.name(each.number) for each in several)
            trials.say(f"the best beside others once more: {names}")
            found = sorted(trials.final(several), key=lambda outcome: outcome.times)
        if len(found) > 1:
            own = found[0].values
            found = [_beside(each, found[0].candidate, own) for each in found]
        self._record.add_final(found or [several[0].outcome], self._used_s)

    def _result(self, tuner: Tuner, why: str) -> Result:
        final = tuple(self._record.final) if why else ()
        if final:
            tuner = tuner.settled(final)
            said = {outcome.candidate: outcome for outcome in tuner.ran}
            final = tuple(said[outcome.candidate] for outcome in final)
        return Result(tuner=tuner, final=final, why=why, used_s=self._used_s)


def _refuse_full(folder: Path) -> None:
    """What failed where there was no room to write says nothing of its plan.

    Raises:
        OSError: there is none.
    """
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(ROOM_BYTES))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error


def _beside(outcome: Outcome, best: int, own: tuple[float, ...]) -> Outcome:
    """As a ratio to the best of the last comparison."""
    found = ratio(outcome.values, own)
    return replace(outcome, times=found.times, within=found.within, against=best, beside=own)


def in_words(outcome: Outcome) -> str:
    """What became of a trial."""
    if outcome.step_s is None:
        return f"failed, {outcome.problem}"
    beside = "" if outcome.against is None else f", {outcome.times:.3f} times the best"
    sure = "" if outcome.against is None else f" +- {outcome.within:.1%}"
    return f"{outcome.step_s:.4g} s a step{beside}{sure}"
