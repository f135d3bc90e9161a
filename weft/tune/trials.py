"""Trials: plans that take turns with the best one, so that what else the machine does slows both.

A trial is as many turns as it takes to be sure which of the two is faster, three at least; what is
compared is the ratio of each turn, and its 95 % interval. Where plans cannot be there side by side
(devices keep their memory while a process stands still), each runs by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Self

from weft.cluster.cluster_file import ClusterFile
from weft.config.errors import RunError
from weft.lab.held import Place
from weft.mix.mix import Rates, student, uncertainty
from weft.mix.questions import Question, Trial
from weft.mix.turns import Entry, Say, Turns
from weft.planner.problem import Workload
from weft.tune.candidate import Candidate
from weft.tune.tuner import Outcome

LEAST_TURNS, MOST_TURNS = 3, 6
SURE = 0.01
"""Half of a ratio's interval that needs no more turns, whichever is faster."""
FINAL_TURNS = 8
"""Most of the last comparison."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as long a plan takes as another."""

    times: float
    within: float
    """Half of the 95 % interval, as a part."""

    @property
    def is_sure(self) -> bool:
        """Which is faster is known, or the two are alike as far as anybody cares."""
        return self.within <= SURE or abs(log(self.times)) > self.within


def ratio(values: Sequence[float], beside: Sequence[float]) -> Ratio:
    """Of rates (tokens per second), two of each at least: turn by turn where both took the same
    turns, else of means."""
    logs, others = [log(v) for v in values], [log(v) for v in beside]
    if len(logs) == len(others):
        off = [other - own for own, other in zip(logs, others, strict=True)]
        return Ratio(exp(fmean(off)), uncertainty(off) or 0.0)
    both = len(logs) + len(others)
    squares = (len(logs) - 1) * stdev(logs) ** 2 + (len(others) - 1) * stdev(others) ** 2
    spread = sqrt(squares / (both - 2) * (1 / len(logs) + 1 / len(others)))
    return Ratio(exp(fmean(others) - fmean(logs)), student(both - 1) * spread)


@dataclass(frozen=True, slots=True)
class Best:
    """What a trial is compared with."""

    number: int
    candidate: Candidate
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How trials are run."""

    work: Workload
    target: Sequence[str]
    """Recipe and overrides of ``weft train``."""
    out: Path
    """A new folder for run folders."""
    cluster_of: Callable[[Candidate], ClusterFile]
    """The chips that a plan runs on."""
    place_of: Callable[[ClusterFile], Place] | None
    """Where ranks run, if not in a lab."""
    together: bool
    """Plans may be there side by side."""


class Trials:
    """A context manager: while it lasts, the best plan so far is there."""

    def __init__(self, setting: Setting, say: Say) -> None:
        self._setting = setting
        work = setting.work
        self._tokens = work.samples * work.seq_len
        self._turns = Turns(work, setting.target, setting.out, say, setting.place_of)
        self._entries: dict[int, Entry] = {}

    def __enter__(self) -> Self:
        self._turns.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._turns.__exit__()

    @property
    def out(self) -> Path:
        """The folder of their run folders."""
        return self._setting.out

    @property
    def used_s(self) -> float:
        """Since it began."""
        return self._turns.used_s

    def say(self, text: str) -> None:
        """With the time."""
        self._turns.say(text)

    def run(self, number: int, candidate: Candidate, best: Best | None) -> Outcome:
        """One trial. The faster of the two stays; where only one can be there, none does."""
        began_s = self.used_s
        several = [self._entry(best.number, best.candidate)] if best and self._together else []
        own = self._until_sure(self._entry(number, candidate), several, best)
        if own.rates.was_killed:
            self.say(f"trial {candidate.name}: {own.rates.problem}; once more")
            self._end(number)
            for entry in several:
                entry.rates.values.clear()
            own = self._until_sure(self._entry(number, candidate), several, best)
        found = self._outcome(number, own, best, self.used_s - began_s)
        is_faster = found.step_s is not None and found.times < 1
        stays = is_faster or (best is None and found.step_s is not None)
        if not self._together or not stays:
            self._end(number)
        elif best is not None:
            self._end(best.number)
        for entry in self._entries.values():
            entry.rates.values.clear()
        return found

    def _until_sure(self, own: Entry, several: Sequence[Entry], best: Best | None) -> Entry:
        for turns in range(1, MOST_TURNS + 1):
            self._turn([own, *several])
            if own.rates.problem or (turns >= LEAST_TURNS and best is None):
                break
            if best is not None and turns >= LEAST_TURNS and self._ratio(own, best).is_sure:
                break
        return own

    def final(self, several: Sequence[Best]) -> list[Outcome]:
        """The first of these and the others, longer than in trials: each as a ratio to the first.
        All of them side by side where they can be. Without those that fail in it; of one that is
        left alone what its trial showed."""
        groups = [several] if self._together else [[each] for each in several]
        values = dict[int, tuple[float, ...]]()
        for group in groups:
            values |= self._last_turns(group)
        left = [each for each in several if each.number in values]
        if len(left) < 2:
            return [each.outcome for each in left]
        first, own = left[0].number, values[left[0].number]
        return [_again(each.outcome, values[each.number], first, own) for each in left]

    def _last_turns(self, several: Sequence[Best]) -> dict[int, tuple[float, ...]]:
        """Rates of those that did not fail, side by side."""
        entries = {each.number: self._entry(each.number, each.candidate) for each in several}
        for _ in range(FINAL_TURNS):
            self._advance([each for each in entries.values() if not each.rates.problem])
        values = {}
        for number, entry in entries.items():
            if entry.rates.problem:
                self.say(f"{entry.rates.trial.name} is left out: {entry.rates.problem}")
            else:
                values[number] = tuple(entry.rates.values)
            if not self._together:
                self._end(number)
        return values

    @property
    def _together(self) -> bool:
        return self._setting.together

    def _entry(self, number: int, candidate: Candidate) -> Entry:
        """A plan that is there and has done its first steps, or has a problem."""
        if number in self._entries:
            return self._entries[number]
        trial = Trial(candidate.name, candidate.plan, Question("alone", 1))
        entry = self._turns.entry("trial", self._setting.cluster_of(candidate), Rates(trial))
        self._entries[number] = entry
        try:
            self._turns.begin([entry])
        except RunError as error:
            entry.rates.problem = str(error)
        self._turn([entry])  # its slower ranks may still be about to train
        entry.rates.values.clear()
        return entry

    def _turn(self, entries: Sequence[Entry]) -> None:
        """The first is the one that may fail."""
        first, *others = entries
        if first.rates.problem:
            return
        self._advance(entries)
        for entry in others:
            if entry.rates.problem:
                problem = f"{entry.rates.problem}, although it had run before"
                raise RunError(f"{entry.rates.trial.name}: {problem}")

    def _advance(self, entries: Sequence[Entry]) -> None:
        """Each by a turn; whose own fault ended it has a problem then."""
        if not entries:
            return
        try:
            self._turns.turn(entries)
        except RunError as error:  # it was refused
            entries[0].rates.problem = str(error)

    def _end(self, number: int) -> None:
        self._turns.end([self._entries.pop(number)])

    def _ratio(self, own: Entry, best: Best) -> Ratio:
        other = self._entries.get(best.number)
        return ratio(own.rates.values, other.rates.values if other else best.outcome.values)

    def _outcome(self, number: int, own: Entry, best: Best | None, cost_s: float) -> Outcome:
        rates = own.rates
        if rates.problem:
            problem = rates.problem
            return Outcome(
                candidate=number, step_s=None, problem=problem, short=rates.short, cost_s=cost_s
            )
        values, found, usual_s = (
            tuple(rates.values),
            Ratio(1.0, 0.0),
            self._tokens / median(rates.values),
        )
        beside = values
        if best is not None:
            assert best.outcome.step_s is not None, "the best ran"
            found, usual_s = self._ratio(own, best), best.outcome.step_s
            other = self._entries.get(best.number)
            beside = tuple(other.rates.values) if other else best.outcome.values
        return Outcome(
            candidate=number,
            step_s=found.times * usual_s,
            times=found.times,
            within=found.within,
            against=None if best is None else best.number,
            values=values,
            beside=beside,
            memory_gib=rates.memory_gib,
            cost_s=cost_s,
        )


def _again(before: Outcome, values: Sequence[float], first: int, own: Sequence[float]) -> Outcome:
    """As it was measured in the last comparison."""
    found = ratio(values, own)
    return replace(
        before,
        times=found.times,
        within=found.within,
        against=first,
        values=tuple(values),
        beside=tuple(own),
    )
