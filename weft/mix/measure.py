"""Measure plans in the lab: real processes on shaped links and limited cores."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from weft.cluster.cluster_file import ClusterFile
from weft.config.errors import ConfigError, RunError
from weft.lab.busy import busy
from weft.lab.rehearsal import Outcome, Rehearsal, rehearse
from weft.mix.mix import MixReport, Rates
from weft.mix.plans import Alone, Kind, Trial, Work, mix_trials, part_trials, tuned_again
from weft.mix.reasons import reasons
from weft.report.metrics import StepMetrics, read_metrics
from weft.train.run_folder import write_text

WARM_UP = 1
"""First steps of a run, which are not counted."""
REFUSED = 2
"""Exit code of a job whose configuration cannot work."""
RESULT = "bench.json"
"""In the folder of a run that has ended: what was asked, and what came of it."""
QUICKLY = ("train.eval_samples=1", "metrics.report=false", "metrics.tensorboard=false")

Say = Callable[[str], None]


def kinds_of(cluster: ClusterFile) -> list[Kind]:
    """The kinds of chips, each with its ranks, in the order of the file.

    Raises:
        ConfigError: there is one kind: nothing is mixed.
    """
    found: dict[str, list[int]] = {}
    for rank, (_, chip) in enumerate(cluster.seats):
        found.setdefault(chip.kind, []).append(rank)
    if len(found) < 2:
        raise ConfigError("hosts.chips.kind", sorted(found), "at least two kinds of chips")
    return [Kind(name, tuple(ranks)) for name, ranks in found.items()]


def only(cluster: ClusterFile, kind: Kind) -> ClusterFile:
    """The part of a cluster that has one kind of chip, with its links."""
    hosts = []
    for host in cluster.hosts:
        chips = tuple(chip for chip in host.chips if chip.kind == kind.name)
        if chips:
            hosts.append(host.model_copy(update={"chips": chips}))
    return cluster.model_copy(update={"hosts": tuple(hosts)})


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
    work: Work
    target: Sequence[str]
    """Recipe and overrides of ``weft train``."""
    out: Path
    """What was measured there before, of the same plans, is not measured again."""
    effort: Effort
    say: Say

    def run(self) -> MixReport:
        """Tune each part, then the mix, then repeat the best of all in turn."""
        kinds = kinds_of(self.cluster)
        found: dict[str, list[Rates]] = {}
        for kind in kinds:
            part = only(self.cluster, kind)
            found[kind.name] = self._tune(kind.name, part, part_trials(kind, self.work))
        parts = {name: _best(trials) for name, trials in found.items()}
        alone = {name: self._alone(best) for name, best in parts.items()}
        mixes = self._tune("mix", self.cluster, mix_trials(kinds, alone, self.work))
        _best(mixes)
        for rates in MixReport(parts, mixes).best_of_generations():
            mixes += self._tune("mix", self.cluster, self._again(rates, kinds))
        report = MixReport(parts, mixes)
        final = [(kind.name, only(self.cluster, kind), parts[kind.name]) for kind in kinds]
        final += [("mix", self.cluster, rates) for rates in report.best_of_generations()]
        for _, _, rates in final:
            rates.values.clear()
            rates.is_final = True
        for repeat in range(1, self.effort.repeats + 1):
            for name, cluster, rates in final:
                where = f"{name}, repeat {repeat} of {self.effort.repeats}"
                self._measure(where, cluster, rates, repeat)
        limits = {chip.kind: chip.memory_gib for _, chip in self.cluster.seats}
        said = reasons(report.best.trial.plan, found, limits, kinds, self.work)
        return MixReport(parts, mixes, said)

    def _alone(self, best: Rates) -> Alone:
        return Alone(best.trial.plan, best.middle / self.work.seq_len)

    def _again(self, rates: Rates, kinds: Sequence[Kind]) -> list[Trial]:
        """The same with shares and layers by how long each rank was busy, if that differs.

        What is pooled stays as its parts were alone.
        """
        if rates.trial.generation == "pooled" or not rates.busy or min(rates.busy) <= 0:
            return []
        seconds = [part * rates.step_s for part in rates.busy]
        return tuned_again(rates.trial, kinds, seconds, self.work)

    def _tune(self, name: str, cluster: ClusterFile, trials: Sequence[Trial]) -> list[Rates]:
        found: dict[str, Rates] = {}
        for trial in trials:
            before = found.get(trial.instead_of)
            if not trial.instead_of or (before is not None and before.problem):
                found[trial.name] = Rates(trial)
                self._measure(name, cluster, found[trial.name], repeat=0)
        return list(found.values())

    def _measure(self, name: str, cluster: ClusterFile, rates: Rates, repeat: int) -> None:
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
        result = self._before(key)
        again = "" if result is None else " (measured before)"
        if result is None:
            result = self._run(cluster, rates.trial, steps)
            folder = Path(result.pop("folder"))
            record = {"key": key, "of": name, "name": rates.trial.name, **asked, "result": result}
            write_text(folder / RESULT, json.dumps(record, indent=2))
        if result["problem"]:
            rates.problem = result["problem"]
            self.say(f"{name}: {rates.trial.name}: failed, {rates.problem}{again}")
            return
        rates.step_s = result["step_s"]
        rates.busy, rates.memory_gib = tuple(result["busy"]), result["memory_gib"]
        rates.values.append(result["tokens"] / rates.step_s)
        self.say(f"{name}: {rates.trial.name}: {rates.values[-1]:.0f} tokens/s{again}")

    def _before(self, key: str) -> dict[str, Any] | None:
        for file in sorted(self.out.glob(f"run*/{RESULT}")):
            record = json.loads(file.read_text("utf-8"))
            if record["key"] == key:
                result: dict[str, Any] = record["result"]
                return result
        return None

    def _run(self, cluster: ClusterFile, trial: Trial, steps: int) -> dict[str, Any]:
        numbers = [int(folder.name.removeprefix("run")) for folder in self.out.glob("run[0-9]*")]
        folder = self.out / f"run{max(numbers, default=-1) + 1:03}"
        plan_file = folder / "asked-plan.json"
        folder.mkdir(parents=True)
        write_text(plan_file, trial.plan.to_json())
        samples = f"batch.samples={self.work.samples}"
        settings = [*self.target, *QUICKLY, samples, f"plan.file={plan_file}", "compute.threads=1"]
        command = [sys.executable, "-m", "weft", "train", *settings, "--out", str(folder)]
        command += ["--steps", str(WARM_UP + steps), "--quiet"]
        asked = Rehearsal(cluster=cluster, command=tuple(command), out=folder, quiet=True)
        outcome = rehearse(asked, _silent)
        if outcome.was_stopped:
            raise KeyboardInterrupt
        if outcome.exit_code == REFUSED:
            raise RunError(f"the trial {trial.name!r} was refused: see above")
        if outcome.exit_code:
            failed = [rank for rank in outcome.ranks if rank.code != 0]
            first = max(failed, key=lambda rank: rank.killed_for_memory)
            return {"folder": folder, "problem": f"rank {first.rank} {first.in_words()}"}
        records, _ = read_metrics(folder / "metrics.jsonl")
        return {"folder": folder, "problem": "", **_figures(cluster, outcome, records)}


def _figures(
    cluster: ClusterFile, outcome: Outcome, records: Sequence[StepMetrics]
) -> dict[str, Any]:
    counted = records[WARM_UP:]
    speeds = [chip.speed for _, chip in cluster.seats]
    return {
        "step_s": median(record.step_time_s for record in counted),
        "tokens": records[-1].tokens,
        "memory_gib": records[-1].memory_gib,
        "busy": busy(outcome.moments, speeds, after_step=WARM_UP),
    }


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


def _silent(_: str) -> None:
    """A bench says itself what it does."""
