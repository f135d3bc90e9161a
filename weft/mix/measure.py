"""Measure plans in the lab: real processes on shaped links and limited cores."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from weft.cluster.cluster import Node
from weft.cluster.cluster_file import ClusterFile
from weft.config.errors import ConfigError, RunError
from weft.lab.rehearsal import Rehearsal, rehearse
from weft.lab.steps import busy
from weft.mix.chips import Chips, Kind, Shown, after_run, after_shortage, kinds_of, only
from weft.mix.mix import MixReport, Rates, reasons
from weft.mix.questions import NAMES, Question, Trial, ask
from weft.planner.fit import without_recompute
from weft.planner.problem import MEMORY_PART, Workload
from weft.planner.search import NoPlan
from weft.report.metrics import read_metrics
from weft.train.run_folder import write_text

WARM_UP = 1
"""First steps of a run, which are not counted."""
LESS_MEMORY = (0.01, 0.1, 0.2, 0.4)
"""By which part less than a plan that ran out of memory the next one may need."""
REFUSED = 2
"""Exit code of a job whose configuration cannot work."""
RESULT = "bench.json"
"""In the folder of a run that has ended: what was asked, and what came of it."""
QUICKLY = ("train.eval_samples=1", "metrics.report=false", "metrics.tensorboard=false")

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long is measured."""

    steps: int
    """Counted steps of a repeat."""
    repeats: int
    tune_steps: int
    """Counted steps of a trial that is only compared with others."""

    @property
    def most(self) -> int:
        """Steps of the longest run."""
        return WARM_UP + max(self.steps, self.tune_steps)


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
    """What was measured there before, of the same plans, is not measured again."""
    effort: Effort
    say: Say

    def run(self) -> MixReport:
        """Tune each part, then the mix, then repeat the best of all in turn."""
        kinds = kinds_of(self.cluster)
        shown, found = Shown(), dict[str, list[Rates]]()
        final = []
        for kind in kinds:
            part = only(self.cluster, kind.name)
            tuning = _Tuning(self, kind.name, part, shown)
            tuning.try_all(Question("alone", micro) for micro in self.micros)
            found[kind.name] = tuning.found
            best = _best(tuning.found)
            shown = tuning.learn_from(best)
            final.append((kind.name, part, best))
        parts = {name: best for name, _, best in final}
        tuning = _Tuning(self, "mix", self.cluster, shown)
        tuning.try_all(self._questions(kinds, parts))
        mixes = tuning.found
        _best(mixes)
        report = MixReport(parts, mixes)
        for rates in report.best_of_generations():
            tuning.try_again(rates)
        final += [("mix", self.cluster, rates) for rates in report.best_of_generations()]
        for _, cluster, rates in final:
            rates.values.clear()
            rates.is_final = True
            chips, plan = Chips.of(cluster, self.machine, shown), rates.trial.plan
            rates.timelines = chips.time(plan, self.work).timelines
            rates.kept_gib = max(chips.memory_gib(without_recompute(plan), self.work))
        for repeat in range(1, self.effort.repeats + 1):
            for name, cluster, rates in final:
                where = f"{name}, repeat {repeat} of {self.effort.repeats}"
                self.measure(where, cluster, rates, repeat)
        limits = {chip.kind: chip.memory_gib for _, chip in self.cluster.by_rank}
        said = reasons(report.best.trial.plan, found, limits, kinds)
        return MixReport(parts, mixes, said)

    def _questions(self, kinds: Sequence[Kind], parts: Mapping[str, Rates]) -> Iterator[Question]:
        """Every generation over the whole cluster."""
        shapes = {name: own for best in parts.values() for name, own in best.trial.shapes.items()}
        yield Question("pooled", max(self.micros), shapes)
        for micro in self.micros:
            yield Question("1", micro)
            yield Question("2", micro)
            if any(len(kind.ranks) > 1 for kind in kinds):
                yield Question("3", micro)

    def measure(self, name: str, cluster: ClusterFile, rates: Rates, repeat: int) -> None:
        """One run of a trial, or what such a run came to before. Repeat 0 is for tuning."""
        steps = self.effort.steps if repeat else self.effort.tune_steps
        asked = {
            "target": list(self.target),
            "samples": self.work.samples,
            "cluster": cluster.model_dump(mode="json"),
            "plan": json.loads(rates.trial.plan.to_json()),
            "steps": [WARM_UP, steps],
            "repeat": repeat,
        }
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        files = sorted(self.out.glob(f"run*/{RESULT}"))
        records = (json.loads(file.read_text("utf-8")) for file in files)
        result = next((record["result"] for record in records if record["key"] == key), None)
        again = "" if result is None else " (measured before)"
        if result is None:
            numbers = [int(run.name.removeprefix("run")) for run in self.out.glob("run[0-9]*")]
            folder = self.out / f"run{max(numbers, default=-1) + 1:03}"
            result = self._run(cluster, rates.trial, steps, folder)
            record = {"key": key, "of": name, "name": rates.trial.name, **asked, "result": result}
            write_text(folder / RESULT, json.dumps(record, indent=2))
        if result["problem"]:
            rates.problem, rates.short = result["problem"], result["short"]
            self.say(f"{name}: {rates.trial.name}: failed, {rates.problem}{again}")
            return
        rates.step_s = result["step_s"]
        rates.busy, rates.memory_gib = tuple(result["busy"]), result["memory_gib"]
        rates.values.append(result["tokens"] / rates.step_s)
        self.say(f"{name}: {rates.trial.name}: {rates.values[-1]:.0f} tokens/s{again}")

    def _run(self, cluster: ClusterFile, trial: Trial, steps: int, folder: Path) -> dict[str, Any]:
        """What a run comes to, as its record keeps it."""
        plan_file = folder / "asked-plan.json"
        folder.mkdir(parents=True)
        write_text(plan_file, trial.plan.to_json())
        settings = [f"batch.samples={self.work.samples}", f"plan.file={plan_file}"]
        command = [sys.executable, "-m", "weft", "train", *self.target, *QUICKLY, *settings]
        command += ["compute.threads=1", "--out", str(folder), "--steps", str(WARM_UP + steps)]
        asked = Rehearsal(cluster=cluster, command=(*command, "--quiet"), out=folder, quiet=True)
        outcome = rehearse(asked, lambda _: None)  # a bench says itself what it does
        if outcome.was_stopped:
            raise KeyboardInterrupt
        if outcome.exit_code == REFUSED:
            raise RunError(f"the trial {trial.name!r} was refused: see above")
        if outcome.exit_code:
            failed = [rank for rank in outcome.ranks if rank.code != 0]
            first = max(failed, key=lambda rank: rank.killed_for_memory)
            short = first.rank if first.killed_for_memory else None
            return {"problem": f"rank {first.rank} {first.in_words()}", "short": short}
        records, _ = read_metrics(folder / "metrics.jsonl")
        speeds = [chip.speed for _, chip in cluster.by_rank]
        return {
            "problem": "",
            "step_s": median(record.step_time_s for record in records[WARM_UP:]),
            "tokens": records[-1].tokens,
            "memory_gib": records[-1].memory_gib,
            "busy": busy(outcome.moments, speeds, after_step=WARM_UP),
        }


class _Tuning:
    """Some chips, and what the runs on them have shown while the planner is asked about them."""

    def __init__(self, bench: Bench, name: str, cluster: ClusterFile, shown: Shown) -> None:
        self._bench = bench
        self._name = name
        self._cluster = cluster
        self._shown = shown
        self.found: list[Rates] = []
        """Of every plan that was tried."""

    def try_all(self, questions: Iterable[Question]) -> None:
        """Measure the planner's answers; what has none is named.

        Raises:
            NoPlan: to any of them.
        """
        refused: NoPlan | None = None
        for question in questions:
            try:
                self._try(question)
            except NoPlan as error:
                refused = error
                generation = NAMES.get(question.generation, "alone")
                self._bench.say(f"{self._name}: {generation}: no plan. {error.hint}")
        if refused is not None and not self.found:
            raise refused

    def try_again(self, rates: Rates) -> None:
        """Ask the same with how long each rank was busy, and measure what is answered anew.

        What is pooled stays as its parts were alone.
        """
        if rates.trial.generation == "pooled" or not rates.busy or min(rates.busy) <= 0:
            return
        self.learn_from(rates)
        trial = ask(rates.trial.question, self._bench.work, self._chips)
        self._measure(replace(trial, name=f"{rates.trial.name}, again"))

    def learn_from(self, rates: Rates) -> Shown:
        """How fast the chips are, as a run has shown; of all that was shown before too."""
        plan, work = rates.trial.plan, self._bench.work
        seconds = [part * rates.step_s for part in rates.busy or (1.0,) * plan.world_size]
        self._shown = after_run(self._shown, self._chips, plan, work, seconds)
        return self._shown

    @property
    def _chips(self) -> Chips:
        return Chips.of(self._cluster, self._bench.machine, self._shown)

    def _try(self, question: Question) -> None:
        """The planner's answer; where that runs out of memory, its next one that needs less."""
        work = self._bench.work
        for less in LESS_MEMORY:
            chips = self._chips
            rates = self._measure(ask(question, work, chips))
            if rates is None or rates.short is None:
                return
            gib = (1 - less) * chips.memory_gib(rates.trial.plan, work)[rates.short] / MEMORY_PART
            self._shown = after_shortage(self._shown, chips, rank=rates.short, gib=gib)

    def _measure(self, trial: Trial) -> Rates | None:
        """None where its plan was measured before."""
        same = [rates for rates in self.found if rates.trial.generation == trial.generation]
        if any(rates.trial.plan == trial.plan for rates in same):
            return None
        while twin := next((rates for rates in same if rates.trial.name == trial.name), None):
            is_same = twin.trial.question == trial.question
            words = "less memory" if is_same else f"asked with micro {trial.question.micro}"
            trial = replace(trial, name=f"{trial.name}, {words}")
        rates = Rates(trial)
        self.found.append(rates)
        self._bench.measure(self._name, self._cluster, rates, repeat=0)
        return rates


def _best(trials: Sequence[Rates]) -> Rates:
    """The fastest.

    Raises:
        ConfigError: none runs.
    """
    best = max(trials, key=lambda rates: rates.middle)
    if not best.values:
        hint = f"The last one: {trials[-1].problem}."
        expected = "chips on which some plan runs"
        raise ConfigError("CLUSTER", trials[-1].trial.name, expected, hint)
    return best
