"""Measure plans in the lab: real processes on shaped links and limited cores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from weft.cluster.cluster import Node
from weft.cluster.cluster_file import ClusterFile
from weft.config.errors import ConfigError, RunError
from weft.mix.chips import Chips, Kind, Shown, after_run, after_shortage, kinds_of, only
from weft.mix.mix import MixReport, Rates, reasons, uncertainty
from weft.mix.questions import NAMES, Question, Trial, ask
from weft.mix.turns import Entry, Say, Turns
from weft.planner.fit import without_recompute
from weft.planner.problem import MEMORY_PART, Workload
from weft.planner.search import NoPlan

LESS_MEMORY = (0.01, 0.1, 0.2, 0.4)
"""By which part less than a plan that ran out of memory the next one may need."""
SURE = 0.03
"""An efficiency that is known so well needs no more turns."""
LEAST_TURNS, FEWEST_TURNS = 3, 2
"""That are taken however sure it is, and however little time is left."""
MAY_BE_BEST = 0.85
"""Of the fastest plan in its tuning run: a slower one is not repeated."""
ASKED_AGAIN = 0.6
"""Part of the time after which the planner is not asked again with what was measured."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured, and where its run folders go."""

    cluster: ClusterFile
    machine: Node
    """That plays it."""
    work: Workload
    """The job that every trial does."""
    micros: Sequence[int]
    """Samples of a microbatch that a rank may have: sizes to try."""
    target: Sequence[str]
    """Recipe and overrides of ``weft train``."""
    out: Path
    minutes: float
    """All in all. At least two turns of each are taken, however long they are."""
    say: Say

    def run(self) -> MixReport:
        """Tune each part, then the mix, then repeat the best of all in turns."""
        kinds = kinds_of(self.cluster)
        parts = [_Tuning(self, kind.name, only(self.cluster, kind.name), Shown()) for kind in kinds]
        with Turns(self.work, self.target, self.out, self.say) as turns:
            _try_all(turns, {part: [Question("alone", m) for m in self.micros] for part in parts})
            best = {part.name: part.best() for part in parts}
            shown = Shown.all_of([part.learn_from(best[part.name].rates) for part in parts])
            mix = self._tuned_mix(turns, best, shown)
            for entry in [*best.values(), *mix.entries]:
                self._predict(entry, shown)
            report = self._repeated(turns, best, mix)
        limits = {chip.kind: chip.memory_gib for _, chip in self.cluster.by_rank}
        tried = {part.name: [entry.rates for entry in part.entries] for part in parts}
        return replace(report, reasons=reasons(report.best.trial.plan, tried, limits, kinds))

    def _tuned_mix(self, turns: Turns, parts: Mapping[str, Entry], shown: Shown) -> _Tuning:
        """All generations, and where there is time those planned with what that has shown."""
        mix = _Tuning(self, "mix", self.cluster, shown)
        _try_all(turns, {mix: list(_questions(kinds_of(self.cluster), parts))})
        mix.best()
        if turns.used_s < ASKED_AGAIN * 60 * self.minutes:
            _try(turns, [(mix, trial) for trial in mix.again()])
        return mix

    def _repeated(self, turns: Turns, parts: Mapping[str, Entry], mix: _Tuning) -> MixReport:
        """The parts, and those of the mix that may be best."""
        final = [*parts.values(), *mix.best_of_generations()]
        turns.end(entry for entry in turns.entries if entry not in final)
        alone = {name: entry.rates for name, entry in parts.items()}
        report = MixReport(alone, [entry.rates for entry in mix.entries])
        self._repeat(turns, final, report)
        return report

    def _predict(self, entry: Entry, shown: Shown) -> None:
        """What a page draws of it, and what it would hold."""
        rates, plan = entry.rates, entry.rates.trial.plan
        chips = Chips.of(entry.cluster, self.machine, shown)
        rates.timelines = chips.time(plan, self.work).timelines
        rates.kept_gib = max(chips.memory_gib(without_recompute(plan), self.work))

    def _repeat(self, turns: Turns, final: Sequence[Entry], report: MixReport) -> None:
        """Until it is known well enough, or there is no time left. What they were in their tuning
        runs does not count."""
        for entry in final:
            entry.rates.values.clear()
            entry.rates.is_final = True
        for number in count(1):
            turns.turn([entry for entry in final if not entry.rates.problem])
            for entry in final:
                if entry.rates.problem:
                    problem = f"{entry.rates.trial.name} failed: {entry.rates.problem}"
                    raise RunError(f"{entry.name}: {problem}, although it had run before")
            within = uncertainty(report.efficiencies)
            sure = "" if within is None else f" +- {within:.3f}"
            turns.say(f"turn {number} of each: efficiency {report.efficiency:.3f}{sure}")
            is_late = turns.used_s > 60 * self.minutes
            if number >= FEWEST_TURNS and is_late:
                return
            if number >= LEAST_TURNS and within is not None and within <= SURE:
                return


def _questions(kinds: Sequence[Kind], parts: Mapping[str, Entry]) -> Iterator[Question]:
    """Every generation over the whole cluster, with microbatches that suit some part."""
    trials = [entry.rates.trial for entry in parts.values()]
    micros = sorted({trial.question.micro for trial in trials})
    shapes = {name: own for trial in trials for name, own in trial.shapes.items()}
    yield Question("pooled", max(micros), shapes)
    for micro in micros:
        yield Question("1", micro)
        yield Question("2", micro)
        if any(len(kind.ranks) > 1 for kind in kinds):
            yield Question("3", micro)


class _Tuning:
    """Some chips, and what the runs on them have shown while the planner is asked about them."""

    def __init__(self, bench: Bench, name: str, cluster: ClusterFile, shown: Shown) -> None:
        self._bench = bench
        self.name = name
        self.cluster = cluster
        self._shown = shown
        self._refused: NoPlan | None = None
        self.entries: list[Entry] = []
        """Of every plan that was tried."""

    def answer(self, turns: Turns, question: Question) -> Trial | None:
        """The planner's; None: there is none, which is said."""
        try:
            return ask(question, self._bench.work, self._chips)
        except NoPlan as error:
            self._refused = error
            generation = NAMES.get(question.generation, "alone")
            turns.say(f"{self.name}: {generation}: no plan. {error.hint}")
            return None

    def refuse_without(self, answers: Iterable[Trial | None]) -> None:
        """Before anything is measured.

        Raises:
            NoPlan: to any question.
        """
        if self._refused is not None and not self.entries and not any(answers):
            raise self._refused

    def again(self) -> Iterator[Trial]:
        """For the best of each generation the planner's answer to the same question with how long
        each rank was busy. What is pooled stays as its parts were alone."""
        for entry in self.best_of_generations():
            rates = entry.rates
            if rates.trial.generation == "pooled" or not rates.busy or min(rates.busy) <= 0:
                continue
            self.learn_from(rates)
            trial = ask(rates.trial.question, self._bench.work, self._chips)
            yield replace(trial, name=f"{rates.trial.name}, again")

    def learn_from(self, rates: Rates) -> Shown:
        """How fast the chips are, as a run has shown; of all that was shown before too."""
        plan, work = rates.trial.plan, self._bench.work
        seconds = [part * rates.step_s for part in rates.busy or (1.0,) * plan.world_size]
        self._shown = after_run(self._shown, self._chips, plan, work, seconds)
        return self._shown

    def learn_of_shortage(self, rates: Rates, less: float) -> None:
        """Its plan ran out of memory: the next one is to need less."""
        assert rates.short is not None, "it did not"
        chips = self._chips
        need = chips.memory_gib(rates.trial.plan, self._bench.work)[rates.short]
        gib = (1 - less) * need / MEMORY_PART
        self._shown = after_shortage(self._shown, chips, rank=rates.short, gib=gib)

    def is_new(self, trial: Trial) -> bool:
        """No plan like it was measured."""
        same = [e.rates.trial for e in self.entries if e.rates.trial.generation == trial.generation]
        return all(other.plan != trial.plan for other in same)

    def named(self, trial: Trial) -> Trial:
        """With a name of its own."""
        while twin := next((e for e in self.entries if e.rates.trial.name == trial.name), None):
            is_same = twin.rates.trial.question == trial.question
            words = "less memory" if is_same else f"asked with micro {trial.question.micro}"
            trial = replace(trial, name=f"{trial.name}, {words}")
        return trial

    def best(self) -> Entry:
        """The fastest.

        Raises:
            ConfigError: none runs.
        """
        best = max(self.entries, key=lambda entry: entry.rates.middle)
        if not best.rates.values:
            rates = self.entries[-1].rates
            hint = f"The last one: {rates.problem}."
            expected = "chips on which some plan runs"
            raise ConfigError("CLUSTER", rates.trial.name, expected, hint)
        return best

    def best_of_generations(self) -> list[Entry]:
        """The fastest of each generation, of those that may be the best of all."""
        found: dict[str, Entry] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.rates.middle):
            if entry.rates.values:
                found[entry.rates.trial.generation] = entry
        fastest = max(entry.rates.middle for entry in found.values())
        return [e for e in found.values() if e.rates.middle >= MAY_BE_BEST * fastest]

    @property
    def _chips(self) -> Chips:
        return Chips.of(self.cluster, self._bench.machine, self._shown)


def _try_all(turns: Turns, wanted: Mapping[_Tuning, Sequence[Question]]) -> None:
    """Measure the planner's answers; where one runs out of memory, its next one that needs less."""
    asked = [(tuning, question) for tuning, several in wanted.items() for question in several]
    for less in LESS_MEMORY:
        answers = [(tuning, tuning.answer(turns, question)) for tuning, question in asked]
        for tuning in wanted:
            tuning.refuse_without(trial for of, trial in answers if of is tuning)
        new = _try(turns, [(tuning, trial) for tuning, trial in answers if trial is not None])
        asked = []
        for tuning, entry in new:
            if entry.rates.short is not None:
                tuning.learn_of_shortage(entry.rates, less)
                asked.append((tuning, entry.rates.trial.question))


def _try(turns: Turns, trials: Iterable[tuple[_Tuning, Trial]]) -> list[tuple[_Tuning, Entry]]:
    """Measure those whose plans were not."""
    begun = []
    for tuning, trial in trials:
        if tuning.is_new(trial):
            rates = Rates(tuning.named(trial))
            entry = turns.entry(tuning.name, tuning.cluster, rates)
            tuning.entries.append(entry)
            begun.append((tuning, entry))
    entries = [entry for _, entry in begun]
    turns.begin(entries)
    turns.try_once(entries)
    return begun
